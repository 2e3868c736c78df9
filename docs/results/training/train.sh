# How the drafters of src/paceline/catalogue/smollm2-135m are trained, on one H200. From the repository's root:
#   bash docs/results/training/train.sh begin         # starts everything in the background
#   bash docs/results/training/train.sh wait SECONDS  # says how far it is; what is finished is packed to $OUT
#   bash docs/results/training/train.sh enough        # no kind begins any more; those that learn end with their best
#   bash docs/results/training/train.sh texts         # packs the texts to $OUT, for a run elsewhere: unpack them in $MADE
# `eagle` is one command: the target writes the texts, and it learns from them, all within MINUTES. As soon as the texts
# are complete, the other kinds learn beside it, one after the other, in what is left of the same time. Where writing takes
# more than TEXTS seconds, what is written by then is all. KINDS: only these; without eagle the texts must be there.
# TOGETHER=1: all others beside each other, MINUTES each. START: a folder of KIND/ trained before, to begin with. LOSS: of
# draft-lm (kl; tv@0.8: see docs/training.md), and KEPT: layers of the target before its own.
# No network is needed; the target must be in the cache (tests/gpu/weights.py).
# A rehearsal on a CPU takes ten minutes: PYTHON=.venv/bin/python DEVICE=cpu DTYPE=float32 MADE=/tmp/rehearsal OUT=/tmp/out \
#   MINUTES=9 TOKENS=4000 TEXTS=200 WRITERS=2 ROWS=8 SHARD=8 QUESTION=32 ANSWER=64 LENGTH=128 BATCH=512 LEAST=1 AFTER=35
set -u
export PYTHONPATH=src PYTHONUNBUFFERED=1
made=${MADE:-/tmp/trained}
minutes=${MINUTES:-19}
kinds=${KINDS:-trigram eagle draft-lm medusa early-exit prophet}
mkdir -p "$made"

wanted() { [[ " $kinds " == *" $1 "* ]]; }

one() { # KIND ARGUMENTS
  local kind=$1
  shift
  wanted "$kind" || return
  [ -e "$made/$kind/README.md" ] && return # it is there: whoever begins again goes on
  [ -d "${START:-/none}/$kind" ] && set -- "$@" --from "$START/$kind" --learning-rate 0.0005
  mkdir -p "$made/$kind" # first: whoever says `enough` sees this folder, or is seen here
  [ -e "$made/no-more" ] && { rmdir "$made/$kind"; return; }
  "${PYTHON:-python3}" -m paceline train --target smollm2-135m --kind "$kind" --out "$made/$kind" --texts "$made/texts" \
    --tokens "${TOKENS:-16000000}" --writers "${WRITERS:-4}" --rows "${ROWS:-256}" --shard "${SHARD:-512}" --question "${QUESTION:-384}" \
    --answer "${ANSWER:-320}" --join --length "${LENGTH:-1024}" --batch "${BATCH:-16384}" --dtype "${DTYPE:-bfloat16}" \
    --device "${DEVICE:-cuda}" --numbers int8 --seed 0 --no-predict --learning-rate 0.001 "$@" > "$made/$kind.log" 2>&1
  echo "$kind ended with $? after $SECONDS s"
}

parts() { # KIND: of the time of the second lane
  case $1 in draft-lm) echo 45 ;; medusa) echo 30 ;; early-exit | prophet) echo 25 ;; *) echo 0 ;; esac
}

slot() { # KIND: minutes for it, its parts of what is left and of who is still to come, less AFTER seconds to start and to finish
  local all=0 each seconds
  for each in draft-lm medusa early-exit prophet; do wanted $each && [ ! -e "$made/$each.minutes" ] && all=$((all + $(parts $each))); done
  seconds=$(((60 * minutes - SECONDS) * $(parts "$1") / (all > 0 ? all : 1) - ${AFTER:-25}))
  [ $seconds -lt 6 ] && seconds=6
  [ -e "$made/$1.minutes" ] || printf '%d.%02d' $((seconds / 60)) $((seconds % 60 * 100 / 60)) > "$made/$1.minutes"
  cat "$made/$1.minutes" # whoever goes on has the time that was given at first
}

there() { grep -qs 'tokens to learn from' "$made/eagle.log"; } # are the texts complete?

texts() { # until they are complete, or nobody is left who writes them; PROCESS: of eagle
  until there || ! kill -0 "$1"; do
    [ $SECONDS -ge "${TEXTS:-330}" ] && [ -d "$made/texts" ] && touch "$made/texts/enough"
    sleep 1
  done 2> /dev/null
  echo "texts after $SECONDS s"
}

other() { # KIND MINUTES
  case $1 in
    draft-lm) one draft-lm --minutes "$2" --option layers=3 --option "kept=${KEPT:-0}" --loss "${LOSS:-kl}" ;;
    medusa) one medusa --minutes "$2" --option heads=3 --option layers=3 ;;
    early-exit) one early-exit --minutes "$2" --option layers=15 --option block=1152 ;;
    prophet) one prophet --minutes "$2" ;;
  esac
}

lanes() {
  if wanted eagle; then
    one eagle --minutes "$minutes" --option vocabulary=16384 --option own_output=false &
    texts $!
  fi
  one trigram --option "least=${LEAST:-64}"
  local kind
  for kind in draft-lm medusa early-exit prophet; do
    wanted $kind || continue
    if [ -n "${TOGETHER:-}" ]; then other $kind "$minutes" & else other $kind "$(slot $kind)"; fi
  done
  wait
  touch "$made/all-done"
}

pack() {
  [ -z "${OUT:-}" ] && return
  for kind in $kinds; do
    [ -e "$made/$kind/README.md" ] && tar cf "$OUT/$kind.tar" -C "$made" --exclude texts --exclude enough --exclude 'checkpoint.*' "$kind"
  done
  tar czf "$OUT/logs.tgz" -C "$made" $(cd "$made" && ls ./*.log ./*/training.jsonl 2> /dev/null)
}

case $1 in
  begin)
    rm -f "$made/all-done" "$made/no-more"
    for kind in $kinds; do rm -f "$made/$kind/enough"; done
    setsid bash "$0" lanes > "$made/lanes.log" 2>&1 < /dev/null &
    ;;
  lanes) lanes ;;
  texts) tar czf - -C "$made" --exclude '*.part' texts | split -b 15m -d - "$OUT/texts.tgz." ;;
  wait)
    [ -e "$made/lanes.log" ] || { echo "Nothing was begun in $made."; exit 1; }
    for _ in $(seq "$2"); do [ -e "$made/all-done" ] && break; sleep 1; done
    tail -n 3 "$made"/*.log
    command -v nvidia-smi > /dev/null && nvidia-smi --query-gpu=utilization.gpu,memory.used --format=csv,noheader
    pack
    for kind in $kinds; do [ -e "$made/$kind/README.md" ] || echo "NOT FINISHED, NOT PACKED: $kind"; done
    ;;
  enough)
    touch "$made/no-more"
    there || { mkdir -p "$made/texts" && touch "$made/texts/enough"; }
    for kind in $kinds; do [ -d "$made/$kind" ] && [ ! -e "$made/$kind/README.md" ] && touch "$made/$kind/enough"; done
    bash "$0" wait "${2:-60}"
    ;;
esac
