# What docs/results/gpu.md was measured with. On a machine with an H200, from the repository's root:
#   bash docs/results/gpu/measure.sh checks|epsilons|speed|serving|drafts|tables|construction|strict|picture [...]
# Records go to /tmp/measured, and packed to $OUT if that is set. pytest is not needed. `paceline bench` needs typer and rich (pure Python wheels on PYTHONPATH).
set -u
export PYTHONPATH=src PYTHONUNBUFFERED=1
python=${PYTHON:-python3}
into=/tmp/measured
mkdir -p "$into"

pack() { [ -z "${OUT:-}" ] || tar czf "$OUT/measured.tgz" -C "$into" .; }

check() { # NAME TITLES
  timeout 330 "$python" tests/gpu/run.py "${@:2}" > "$into/checks-$1.txt" 2>&1 &
}

checks() { # everything in tests/gpu/run.py, in processes beside each other: nothing is timed here
  check texts strict=False
  check strict strict=True
  check kernels bits race trees unrolled company "ratio by" "eagle by" memory threads
  check graphs-llama "cuda_graph llama"
  check graphs-gpt2 "cuda_graph gpt2"
  check eager "eager llama" "eager gpt2"
  check reads reads
  wait
  grep -h -B1 -A25 FAILED "$into"/checks-*.txt | head -150
  tail -n 3 "$into"/checks-*.txt
}

epsilons() { # how little the later layers must add for the first three to agree with them so often
  "$python" - > "$into/epsilons.txt" <<'PY'
from paceline.models.synthetic import eps_for
for shape in ("llama-135m", "llama-7b"):
    for rate in (0.6, 0.8, 0.9):
        found = eps_for(rate, shape, 3, dtype="bfloat16", device="cuda", steps=7, close=0.02)
        print(shape, rate, f"{found.eps:.6g}", f"{found.agreement:.3f}", flush=True)
PY
}

speed() { "$python" tests/gpu/speed.py llama-135m llama-7b 2>&1 | tee "$into/speed.txt"; }

serving() { # the engine thread of the server: texts under load, then tokens per second, gaps and first tokens
  PYTHONPATH=src:. timeout 150 "$python" tests/gpu/serving.py checks 2>&1 | tee "$into/serving-checks.txt"
  PYTHONPATH=src:. timeout 200 "$python" tests/gpu/serving.py speed llama-135m llama-7b 2>&1 | tee "$into/serving-speed.txt"
}

drafts() { "$python" tests/gpu/drafts.py llama-135m llama-7b 2>&1 | tee "$into/drafts.txt"; } # and whole rounds with trees

picture() {
  "$python" tests/gpu/picture.py llama-135m eager auto 2>&1 | tee "$into/picture.txt"
  "$python" tests/gpu/picture.py llama-7b auto 2>&1 | tee -a "$into/picture.txt"
}

bench() { # NAME ARGUMENTS: one record
  local name=$1
  shift
  rm -rf "$into/$name.jsonl" "$into/$name"
  "$python" -m paceline bench --device cuda --dtype bfloat16 --run draft-model --limit 2 --repeats 4 --max-new-tokens 128 --warm-up 128 \
    --force --out "$into/$name" "$@" > "$into/$name.txt" 2>&1
  cp "$into/$name/bench.jsonl" "$into/$name.jsonl"
  grep -v '^\[' "$into/$name.txt"
  pack
}

tables() {
  for shape in llama-135m llama-7b; do for rate in 0.8 0.9 0.6; do
    echo "== $shape, right $rate"
    plain=() # what plain decoding of transformers takes does not depend on the rate
    [ "$rate" = 0.8 ] && plain=(--peer hf)
    bench "$shape-$rate" --shape "$shape" --synthetic-acceptance "$rate" --peer hf-assisted "${plain[@]}"
  done; done
}

construction() { # the first three layers draft; the others add what `epsilons` found (epsilons.txt); SHAPES: of these only
  while read -r shape rate eps _; do
    echo "== $shape, agreeing $rate by construction, eps $eps"
    bench "$shape-agreeing-$rate" --shape "$shape" --construction "$eps" --draft-shape "$shape:layers=3" --peer hf-assisted --run draft-model:gamma=3
  done < <(grep "${SHAPES:-llama}" docs/results/gpu/epsilons.txt)
}

strict() { "$python" tests/gpu/strict.py smollm2-135m weights/gpu/prompts.jsonl 200 2>&1 | tee "$into/strict.txt"; }

for part in "$@"; do
  began=$SECONDS
  echo "# $part"
  "$part"
  pack
  echo "# $part took $((SECONDS - began)) s"
done
