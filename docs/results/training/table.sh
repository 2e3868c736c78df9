# One table of everything trained, with the drafters of the catalogue, or of CATALOGUE/smollm2-135m:
#   bash docs/results/training/table.sh OUT.jsonl (the record is OUT/bench.jsonl) [arguments of `python -m paceline bench`, such as --limit 1 --device cuda --dtype bfloat16]
# PROMPTS: a file of prompts with categories, such as Spec-Bench's. And plain decoding of the draft by itself. A kind that is not there is left out.
set -eu
export PYTHONPATH=src PYTHONUNBUFFERED=1
python=${PYTHON:-python3}
home=${CATALOGUE:-src/paceline/catalogue}/smollm2-135m
draft=${DRAFT:-$(mktemp -d)/draft-lm} # the draft-lm as a model of its own; made, where it is not there
out=$1
shift
common=(--prompts "${PROMPTS:-weights/gpu/prompts.jsonl}" --max-new-tokens "${NEW:-128}" --memory --force "$@")
runs=()

run() { # KIND LABEL [MORE]: of a drafter that is there
  [ -d "$home/$1" ] || return 0
  runs+=(--run "{\"name\": \"$home/$1\", \"label\": \"$2\"${3:+, $3}}")
}

run draft-lm draft-lm
run draft-lm "draft-lm, tree" '"tree": "levels"'
if [ -d "$home/draft-lm" ]; then
  [ -d "$draft" ] || "$python" -c 'import sys; from paceline.drafters.heads.export_head import export_head; export_head(*sys.argv[1:])' \
    "$home/draft-lm" smollm2-135m "$draft" hf
  [ -d "$home/trigram" ] && runs+=(--run "{\"name\": \"staged\", \"model\": \"$draft\", \"inner\": {\"name\": \"trigram\", \"file\": \"$home/trigram/model.safetensors\"}, \"label\": \"staged\"}")
fi
run trigram trigram
run medusa medusa '"gamma": 3, "tree": "best-first", "nodes": 24, "branch": 4, "width": 4'
run eagle "eagle, chain of 4" '"gamma": 4'
run eagle "eagle, 24 nodes" '"gamma": 5, "tree": "best-first", "nodes": 24, "branch": 4, "width": 4'
run eagle "eagle, 60 nodes" '"gamma": 7, "tree": "best-first", "nodes": 60, "branch": 8, "width": 8'
run prophet prophet
runs+=(--run auto)
run early-exit early-exit '"gamma": 3'
"$python" -m paceline bench --target smollm2-135m "${common[@]}" --out "${out%.jsonl}" "${runs[@]}" --peer hf --peer hf-assisted --peer hf-lookup
if [ -d "$draft" ]; then "$python" -m paceline bench --target "$draft" "${common[@]}" --out "${out%.jsonl}-draft"; fi
