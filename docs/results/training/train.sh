# How the drafters of src/paceline/catalogue/smollm2-135m are trained, on one H200. From the repository's root:
#   bash docs/results/training/train.sh begin         # starts everything in the background
#   bash docs/results/training/train.sh wait SECONDS  # says how far it is; what is finished is packed to $OUT
#   bash docs/results/training/train.sh enough        # ends what runs with its best weights so far
# Texts first (the trigram's run writes them), then two lanes beside each other. No network, typer or rich is needed; the
# target must be in the cache (tests/gpu/weights.py).
set -u
export PYTHONPATH=src PYTHONUNBUFFERED=1
made=/tmp/trained
mkdir -p "$made"

one() { # KIND ARGUMENTS
  local kind=$1
  shift
  [ -e "$made/no-more" ] && return
  python3 -m paceline.training --target smollm2-135m --kind "$kind" --out "$made/$kind" --texts "$made/texts" --tokens "${TOKENS:-16000000}" \
    --writers 5 --rows 512 --shard 512 --question 384 --join --length 1024 --dtype bfloat16 --device cuda --numbers int8 --seed 0 --no-predict \
    "$@" > "$made/$kind.log" 2>&1
}

lanes() {
  one trigram --options least=48
  one eagle --steps "${EAGLE:-5500}" --learning-rate 0.001 --options vocabulary=16384 --options own_output=false &
  one draft-lm --steps "${DRAFT:-3000}" --learning-rate 0.001 --options layers=3
  one medusa --steps "${MEDUSA:-2000}" --learning-rate 0.001 --options layers=2
  one early-exit --steps "${EXIT:-1500}" --learning-rate 0.001 --options block=1152
  one prophet --steps "${PROPHET:-2000}" --learning-rate 0.001
  wait
  touch "$made/all-done"
}

pack() {
  [ -z "${OUT:-}" ] && return
  for kind in trigram eagle draft-lm medusa early-exit prophet; do
    [ -e "$made/$kind/provenance.json" ] && tar cf "$OUT/$kind.tar" -C "$made" --exclude texts "$kind"
  done
  tar czf "$OUT/logs.tgz" -C "$made" $(cd "$made" && ls ./*.log ./*/training.jsonl 2> /dev/null)
}

case $1 in
  begin) setsid bash "$0" lanes > "$made/lanes.log" 2>&1 < /dev/null & ;;
  lanes) lanes ;;
  wait)
    for _ in $(seq "$2"); do [ -e "$made/all-done" ] && break; sleep 1; done
    tail -n 3 "$made"/*.log
    nvidia-smi --query-gpu=utilization.gpu,memory.used --format=csv,noheader
    pack
    ;;
  enough)
    touch "$made/no-more"
    for kind in "$made"/*/; do [ -e "$kind/training.jsonl" ] && touch "$kind/enough"; done
    bash "$0" wait "${2:-60}"
    ;;
esac
