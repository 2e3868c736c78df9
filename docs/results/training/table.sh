# One table of everything trained (seeds.md §3), with the drafters of the catalogue:
#   bash docs/results/training/table.sh OUT.jsonl [arguments of `python -m paceline.bench`, such as --limit 1 --device cuda --dtype bfloat16]
# And plain decoding of the draft by itself. DRAFT: the draft-lm as a model of its own
# (paceline export src/paceline/catalogue/smollm2-135m/draft-lm --target smollm2-135m --to hf --out DRAFT).
set -eu
home=${CATALOGUE:-src/paceline/catalogue}/smollm2-135m
out=$1
shift
common=(--prompts "${PROMPTS:-weights/gpu/prompts.jsonl}" --max-new-tokens 128 --memory --force "$@")
python3 -m paceline.bench --target smollm2-135m "${common[@]}" --out "$out" \
  --runs "{\"name\": \"$home/draft-lm\", \"label\": \"draft-lm\"}" \
  --runs "{\"name\": \"$home/draft-lm\", \"tree\": \"levels\", \"label\": \"draft-lm, tree\"}" \
  --runs "{\"name\": \"staged\", \"model\": \"$DRAFT\", \"inner\": {\"name\": \"trigram\", \"file\": \"$home/trigram/model.safetensors\"}, \"label\": \"staged\"}" \
  --runs "{\"name\": \"$home/trigram\", \"label\": \"trigram\"}" \
  --runs "{\"name\": \"$home/medusa\", \"gamma\": 4, \"tree\": \"best-first\", \"nodes\": 16, \"label\": \"medusa\"}" \
  --runs "{\"name\": \"$home/eagle\", \"label\": \"eagle, chain\"}" \
  --runs "{\"name\": \"$home/eagle\", \"gamma\": 6, \"tree\": \"best-first\", \"nodes\": 24, \"label\": \"eagle\"}" \
  --runs "{\"name\": \"$home/prophet\", \"label\": \"prophet\"}" \
  --runs "{\"name\": \"$home/early-exit\", \"gamma\": 3, \"label\": \"early-exit\"}" \
  --peers hf --peers hf-assisted --peers hf-lookup
python3 -m paceline.bench --target "$DRAFT" "${common[@]}" --out "${out%.jsonl}-draft.jsonl"
