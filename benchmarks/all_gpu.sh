#!/usr/bin/env bash
# Every number of docs/explanation/speed.md that needs a GPU, in about four minutes: bash benchmarks/all_gpu.sh [FOLDER]
# Without CIFAR-10 in $SOSELETO_DATA the whole training runs on as many random images. Needs only torch and numpy.
set -u
cd "$(dirname "$0")/.."
out="${1:-results}"
python="${PYTHON:-python}"
export PYTHONPATH="src:benchmarks"
data=$([ -d "${SOSELETO_DATA:-/nowhere}/cifar-10-batches-bin" ] || echo --made-up)
failed=0
"$python" benchmarks/step.py --check --out "$out/step-gpu.json" || failed=1
"$python" benchmarks/step.py --channels-last --out "$out/step-channels-last-gpu.json"
for form in "" --bf16; do
  "$python" benchmarks/end_to_end.py $data --channels-last $form --only "soseleto.fit" "plain PyTorch, tensors on the device" \
    --check --out "$out/end_to_end${form#-}-gpu.json" || failed=1
done
"$python" benchmarks/peers.py --check --out "$out/peers-gpu.json" || failed=1
"$python" benchmarks/scaling.py --check --out "$out/scaling-gpu.json" || failed=1
exit $failed
