#!/bin/bash
# Training on two GPUs of one machine beside one: the same bits, killed and resumed, and how fast (docs/ranks.md).
#   tools/ranks_gpu_test.sh pack BUILD FOLDER    where MPI is: what a machine without it needs, into FOLDER: the program, its libraries and OpenMPI's
#   tools/ranks_gpu_test.sh try FOLDER PROGRAM   starts FOLDER's mpirun here as the other machine will, in an empty environment; PROGRAM is one with the emulated device
#   tools/ranks_gpu_test.sh run FOLDER OUT       on the machine with the GPUs, in the root of the sources: about 3 minutes; OUT/ranks.json and logs
# Environment of run: STEPS (8) timed steps, MODELS ("340m 1.3b"), BATCH (8) sequences of 2,048 tokens.
set -euo pipefail

usage() {
  sed -n '2,7s/^# \?//p' "$0" >&2
  exit 2
}

# Every library that a file needs but the C library, which is the machine's own.
libraries_of() {
  ldd "$@" 2> /dev/null | awk '/=> \//{print $3}' | sort -u | grep -vE '/(libc|libm|libpthread|libdl|librt|libresolv|libutil|ld-linux[^/]*)\.so' || true
}

pack() {
  local build=$1 folder=$2 system=/usr/lib/x86_64-linux-gnu
  rm -rf "$folder"
  mkdir -p "$folder/lib" "$folder/mpi/bin" "$folder/mpi/lib/x86_64-linux-gnu/openmpi/lib/openmpi3" "$folder/mpi/share"
  cp "$build/fastweight" "$folder/fastweight"
  strip --strip-unneeded "$folder/fastweight"
  cp -L /usr/bin/mpirun "$folder/mpi/bin/mpirun"
  cp -L /usr/bin/orted "$folder/mpi/bin/orted"
  cp -RL /usr/share/openmpi "$folder/mpi/share/openmpi"
  # Plugins but those of networks (UCX, libfabric, verbs), of Slurm and of what is not used, whose libraries are large or elsewhere.
  local plugin
  for plugin in "$system"/openmpi/lib/openmpi3/mca_*.so; do
    case $(basename "$plugin") in *ucx* | *ofi* | *psm* | *openib* | *verbs* | *monitoring* | *romio* | *flux* | *slurm* | *memheap* | *scoll* | *spml* | *sshmem* | *atomic*) continue ;; esac
    cp -L "$plugin" "$folder/mpi/lib/x86_64-linux-gnu/openmpi/lib/openmpi3/"
  done
  cp -L "$system"/openmpi/lib/libmca_common_{sm,ompio}.so* "$folder/lib/" 2> /dev/null || true
  if [ -d "$system/pmix2" ]; then
    mkdir -p "$folder/mpi/lib/x86_64-linux-gnu/pmix2/lib"
    for plugin in "$system"/pmix2/lib/pmix "$system"/pmix2/lib/pmix2; do
      [ -d "$plugin" ] && cp -RL "$plugin" "$folder/mpi/lib/x86_64-linux-gnu/pmix2/lib/"
    done
    cp -RL "$system/pmix2/share" "$folder/mpi/lib/x86_64-linux-gnu/pmix2/"
  fi
  local all
  mapfile -t all < <(find "$folder" -type f \( -name '*.so' -o -perm -u+x \))
  libraries_of "$build/fastweight" "${all[@]}" | while read -r library; do cp -L "$library" "$folder/lib/"; done
  du -sh "$folder"
}

# mpirun of FOLDER: no other machine, no network, more ranks than cores if need be, root as containers have it.
mpirun_of() {
  local folder
  folder=$(cd "$1" && pwd)
  export OPAL_PREFIX=$folder/mpi PMIX_INSTALL_PREFIX=$folder/mpi/lib/x86_64-linux-gnu/pmix2
  export LD_LIBRARY_PATH=$folder/lib:${LD_LIBRARY_PATH:-}
  launcher=("$folder/mpi/bin/mpirun" --allow-run-as-root --oversubscribe --bind-to none --mca plm isolated --mca btl "self,vader" --mca pml ob1
    --mca btl_vader_single_copy_mechanism none --mca oob_tcp_if_include lo --mca orte_tmpdir_base "${TMPDIR:-/tmp}")
}

try() {
  local folder=$1 program
  program=$(realpath "$2")
  local work
  work=$(mktemp -d)
  seq 1 3000 > "$work/text"
  env -i PATH=/usr/bin:/bin HOME="$work" bash -c '
    set -euo pipefail
    source "$1" functions
    mpirun_of "$2"
    for ranks in 1 2; do
      "${launcher[@]}" -n $ranks "$3" train --text "$4/text" --out "$4/of-$ranks" --device cuda --sums apart --accumulate 2 --batch 1 --length 12 --steps 2 \
        --hidden-size 16 --num-hidden-layers 1 --num-heads 2 --head-dim 8 --valid-fraction 0 --threads 1
    done
    cmp "$4/of-1/model/model.safetensors" "$4/of-2/model/model.safetensors" && echo "the same model"' \
    try "$(realpath "$0")" "$(realpath "$folder")" "$program" "$work"
  rm -rf "$work"
}

run() {
  local folder out program work
  folder=$(realpath "$1")
  mkdir -p "$2"
  out=$(realpath "$2")
  program=$folder/fastweight
  work=$(mktemp -d)
  mpirun_of "$folder"
  # cuBLASLt and NCCL of Python's packages.
  local nvidia
  nvidia=$(env -u LD_LIBRARY_PATH python3 -c 'import nvidia; print("\n".join(nvidia.__path__))' 2> /dev/null | head -n 1 || true)
  if [ -n "$nvidia" ]; then
    for libs in "$nvidia"/*/lib; do LD_LIBRARY_PATH=$LD_LIBRARY_PATH:$libs; done
  fi
  export LD_LIBRARY_PATH NCCL_DEBUG=${NCCL_DEBUG:-WARN} NCCL_NVLS_ENABLE=0  # no multicast, which others on the host may need whole
  env -u LD_LIBRARY_PATH nvidia-smi --query-gpu=name,driver_version --format=csv,noheader || true
  cat docs/*.md > "$work/text"
  local small=(train --text "$work/text" --device cuda --steps 200 --log-every 10 --accumulate 4 --batch 4 --length 256 --hidden-size 256 --num-hidden-layers 2
    --num-heads 4 --head-dim 64 --valid-fraction 0 --checkpoint-every 50 --seed 3)
  local failed=0
  step() {
    local name=$1
    shift
    local start=$SECONDS
    if timeout 150 "$@" > "$out/$name.log" 2>&1; then
      echo "ok      $name ($((SECONDS - start)) s)"
    else
      echo "FAILED  $name (status $?, $((SECONDS - start)) s)"
      tail -n 25 "$out/$name.log"
      failed=1
    fi
  }
  step one "$program" "${small[@]}" --sums apart --out "$work/one"
  step nccl "${launcher[@]}" -n 2 "$program" "${small[@]}" --out "$work/nccl"
  step staged "${launcher[@]}" -x FASTWEIGHT_NCCL=off -n 2 "$program" "${small[@]}" --out "$work/staged"
  step local "${launcher[@]}" -n 2 "$program" "${small[@]}" --sums local --out "$work/local"
  step too_many bash -c '"$@" 2>&1 | tee /dev/stderr | grep "expected a GPU for each"' try "${launcher[@]}" -n 9 "$program" "${small[@]}" --accumulate 9 --out "$work/many"
  grep -h 'tensors go by' "$out"/{nccl,staged,local}.log || failed=1
  # Killed behind its first checkpoint, and gone on with on one GPU.
  "${launcher[@]}" -n 2 "$program" "${small[@]}" --out "$work/killed" > "$out/killed.log" 2>&1 &
  local mpirun=$! rank=
  for _ in $(seq 3000); do
    [ -d "$work/killed/checkpoints/step-50" ] && break
    sleep 0.01
  done
  rank=$(cat /proc/"$mpirun"/task/*/children 2> /dev/null | awk '{last = $NF} END {print last}' || true)
  if [ -n "$rank" ]; then kill -9 "$rank"; fi
  wait "$mpirun" && echo "note: the run was over before it was killed"
  step resumed "$program" train --resume --out "$work/killed"

  # The bench has a model's keys as options.
  local name path ranks sums
  for name in ${MODELS:-340m 1.3b}; do
    path=recipes/papers/$([ "$name" = 1.3b ] && echo 1.3b-gated-deltanet2-hybrid || echo 340m-gated-deltanet).toml
    local options=()
    mapfile -t options < <(env -u LD_LIBRARY_PATH python3 - "$path" << 'PYTHON'
import sys, tomllib
recipe = tomllib.load(open(sys.argv[1], "rb"))
keys = list(recipe["model"].items())
for mixer, table in recipe.get("mixer", {}).items():
    keys += [(f"{mixer}_{key}", value) for key, value in table.items()]
for key, value in keys:
    if isinstance(value, bool):
        print(f"--{'' if value else 'no-'}{key.replace('_', '-')}")
    else:
        print(f"--{key.replace('_', '-')}")
        print(",".join(map(str, value)) if isinstance(value, list) else value)
PYTHON
    )
    local bench=("$program" bench --train --device cuda --steps "${STEPS:-8}" --batch "${BATCH:-8}" --length 2048 "${options[@]}")
    step "bench-$name-1" "${bench[@]}" --accumulate 2 --json "$out/$name-1.json"
    step "bench-$name-2" "${launcher[@]}" -n 2 "${bench[@]}" --accumulate 2 --json "$out/$name-2.json"
    step "bench-$name-2-local" "${launcher[@]}" -n 2 "${bench[@]}" --accumulate 8 --sums local --json "$out/$name-2-local.json"
  done
  env -u LD_LIBRARY_PATH python3 - "$work" "$out" "$failed" << 'PYTHON'
import glob, hashlib, json, os, sys
work, out, failed = sys.argv[1], sys.argv[2], int(sys.argv[3])
def losses(run):
    try:
        return [json.loads(line)["loss"] for line in open(f"{work}/{run}/metrics.jsonl")]
    except OSError:
        return []
def model(run):
    try:
        return hashlib.sha256(open(f"{work}/{run}/model/model.safetensors", "rb").read()).hexdigest()
    except OSError:
        return ""
report = {"runs": [], "results": []}
want = losses("one")
for run in ["one", "nccl", "staged", "killed", "local"]:
    got = losses(run)
    apart = max((abs(a - b) / b for a, b in zip(got, want)), default=None)
    same = model(run) != "" and model(run) == model("one")
    good = len(got) == len(want) > 0 and apart <= 5e-3 and (same or run == "local")
    failed |= not good
    report["runs"].append({"run": run, "steps": len(got), "largest_relative_difference_of_losses": apart, "same_bits_as_one_gpu": same, "ok": good})
    print(f"{'ok    ' if good else 'FAILED'}  {run}: {len(got)} losses, at most {apart} apart; {'the same bits' if same else 'other bits'}")
for path in sorted(glob.glob(f"{out}/*-[12]*.json")):
    name = os.path.basename(path)[:-5]
    row = json.load(open(path))["train"]
    report["results"].append({"run": name, **{key: row.get(key) for key in ["model", "ranks", "shape", "sums", "device", "carrier", "ktok_s", "peak_gib", "sending_ms",
                              "sending_share", "ms_per_step", "step_over_products", "recompute", "moments"]}})
    share = row.get("sending_share")
    print(f"{name:16} {row['ktok_s']:8.2f} ktok/s  {row['peak_gib']:6.2f} GiB a GPU" + (f"  sending {100 * share:.1f}%" if share is not None else ""))
json.dump(report, open(f"{out}/ranks.json", "w"), indent=2)
sys.exit(failed)
PYTHON
}

case ${1:-} in
  pack | run | try) [ $# -eq 3 ] || usage; "$@" ;;
  functions) ;;  # to be sourced
  *) usage ;;
esac
