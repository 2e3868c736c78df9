# The fifth run, on one H200: two draft-lm beside each other, on texts of before and new ones.
#   bash docs/results/training/draft.sh > /tmp/draft.log 2>&1 &
#   KINDS=draft-lm MADE=/tmp/trained bash docs/results/training/train.sh wait SECONDS   # or MADE=/tmp/deep, once that was begun
# In $MADE (/tmp/trained): the one of three layers in $START/draft-lm goes on, by total variation at temperature 0.8, after
# $WRITE seconds of writing at most (TOKENS are enough). In $DEEP (/tmp/deep): three layers after the target's first three as they are, begun anew by KL
# (in $DEEP/first), then by total variation. Minutes: ALL of the first; FIRST and THEN of the second.
set -u
train=docs/results/training/train.sh
made=${MADE:-/tmp/trained}
deep=${DEEP:-/tmp/deep}
export KINDS=draft-lm
unset OUT # nothing is packed before somebody waits for it

rm -f "$made/texts/enough" "$made/draft-lm.log" # what an earlier run said of its texts
(sleep "${WRITE:-240}"; touch "$made/texts/enough") &
MADE=$made START=${START:-/tmp/start} LOSS=tv@0.8 MINUTES=${ALL:-16} bash $train begin
until grep -qs 'tokens to learn from' "$made/draft-lm.log"; do sleep 1; [ -e "$made/all-done" ] && exit 1; done
mkdir -p "$deep/first"
ln -sfn "$made/texts" "$deep/texts"
ln -sfn "$made/texts" "$deep/first/texts"
START= MADE=$deep/first KEPT=3 LOSS=kl MINUTES=${FIRST:-7} bash $train begin
MADE=$deep/first bash $train wait 1200
MADE=$deep KEPT=3 START=$deep/first LOSS=tv@0.8 MINUTES=${THEN:-5} bash $train begin
