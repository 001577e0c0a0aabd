# A thin front for CMake, so that the usual things are one word each. `make help` lists them.
# Paths are relative on purpose: the clone may lie anywhere, in a folder with spaces too.
JOBS ?= $(shell nproc)
PREFIX ?= /usr/local
DESTDIR ?=
TEXT ?=
MINUTES ?= 60
FUZZ_SECONDS ?= 60
# Compilations are found again in the cache by clones in other folders.
export CCACHE_BASEDIR ?= $(CURDIR)
CMAKE_BUILD := tools/build.sh build $(JOBS)
# For clangd: one command a source, although sources are compiled in groups.
COMPILE_COMMANDS := @! command -v python3 > /dev/null || tools/compile_commands.py build
# Programs for a GPU are tests where there is one; elsewhere nvcc's time for them is spared (CI builds them all the same).
GPU := $(wildcard /dev/nvidiactl)
TEST_TARGETS := $(if $(GPU),all,fw_tests fastweight_program fastweight_shared fastweight_pages)
NVCC := $(firstword $(shell command -v nvcc 2> /dev/null) $(wildcard /usr/local/cuda/bin/nvcc))
# Of what takes longest (labels turn0 to turn2) the third with this number; TURN empty: all.
OF_TURN = $(if $(TURN),-LE '^turn[^$(TURN)]$$')
NOT_IN_TEST := ^(long$(if $(GPU),,|gpu))$$

.PHONY: all gpu deps configure test test-long torture demo install wheel bench gpu-test gpu-bench format check format-check floors tidy sanitize asan-ubsan tsan fuzz clean help
all: configure ## build the program (build/fastweight) and the library (6 minutes on two cores)
	$(CMAKE_BUILD) fastweight_program fastweight_shared fastweight_pages
	$(COMPILE_COMMANDS)

gpu: ## the same with device code (30 minutes on two cores); brings CUDA's compiler and cuBLAS (1 GB, ~/.cache/fastweight) where there are none
	@tools/install-deps.sh build $(if $(NVCC),,gpu)
	@$(if $(NVCC),,tools/install-cuda.sh > /dev/null)
	cmake --preset release -DFW_CUDA=ON
	$(CMAKE_BUILD) fastweight_program fastweight_shared fastweight_pages
	$(COMPILE_COMMANDS)

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-11s %s\n", $$1, $$2}' Makefile

deps:
	@tools/install-deps.sh build

# CMake itself notices changed lists and new files; only the first time needs a call.
configure: deps
	@test -f build/build.ninja || cmake --preset release

test: configure ## build and run the tests, but for the long ones (15 minutes on two cores); no device code without a GPU
	@tools/install-deps.sh test
	$(CMAKE_BUILD) $(TEST_TARGETS)
	$(COMPILE_COMMANDS)
	ctest --preset release -j $(JOBS) -LE '$(NOT_IN_TEST)'

test-long: configure ## the long tests: the emulated device's, also in other orders of its threads; small models that learn tasks; the wheel (TURN=0, 1 or 2: a third)
	@tools/install-deps.sh test
	$(CMAKE_BUILD) fw_long_tests
	ctest --preset release -j $(JOBS) -L '^long$$' $(OF_TURN)

torture: configure ## interrupt, kill, damage and fill up what the program writes, for MINUTES (60); docs/robustness.md
	@$(CMAKE_BUILD) fastweight_program
	tools/torture.sh $(MINUTES)

demo: ## build for this machine, go on training a model with fortunes (or TEXT=my.txt), evaluate, generate, look inside (5 minutes on two cores)
	@tools/install-deps.sh demo
	@test -f build-demo/build.ninja || cmake --preset demo > /dev/null
	@tools/build.sh build-demo $(JOBS) fastweight_program
	@tools/demo.sh $(TEXT)

install: all ## into PREFIX (/usr/local), staged under DESTDIR: program, manual page, completions, library, header, CMake and pkg-config files
	DESTDIR="$(DESTDIR)" cmake --install build --prefix "$(PREFIX)"
	@if [ -z "$(DESTDIR)" ] && [ "$$(id -u)" = 0 ]; then ldconfig; fi

wheel: deps ## the Python package (PyTorch, flash-linear-attention) as dist/fastweight-*.whl; docs/python.md
	@tools/wheel.sh dist

bench: configure ## time the recurrence and a training step on this machine
	@$(CMAKE_BUILD) fastweight_program
	build/fastweight bench

gpu-test: configure ## on a machine with a GPU: the tests of device code, selftest, then compute-sanitizer on small shapes
	@tools/install-deps.sh test
	$(CMAKE_BUILD) gpu_tests fastweight_program
	tools/gpu_test.sh build

gpu-bench: configure ## on a machine with a GPU: time the recurrence; JSON under bench/results/
	@$(CMAKE_BUILD) fastweight_program
	tools/gpu_bench.sh build/fastweight bench/results

format: ## clang-format all sources in place
	@tools/install-deps.sh ci
	@tools/sources.sh | xargs -d '\n' clang-format -i

check: format-check floors tidy ## formatting, floors, citations, documents, the table of rules, clang-tidy (MINUTES=60)

format-check:
	@tools/install-deps.sh ci
	@tools/sources.sh | xargs -d '\n' clang-format --dry-run --Werror
	@echo "format: $$(tools/sources.sh | wc -l) files are as clang-format writes them"

floors:
	@tools/check_floors.py
	@tools/check_citations.py
	@tools/check_words.py
	@tools/check_comments.py
	@tools/check_docs.py $(if $(wildcard build/fastweight),--program build/fastweight)
	@tools/readme_table.py --check
	@tools/c_api_page.py --check
	@tools/papers_page.py --check
	@tools/freeze_abi.py --check

tidy:
	@tools/install-deps.sh ci
	@cmake --preset tidy > /dev/null
	@tools/tidy.py --minutes $(MINUTES)

sanitize: asan-ubsan tsan ## the small tests under AddressSanitizer and UBSan, then under ThreadSanitizer (PART=host or device: without or with kernels alone; TURN: a third of the kernels' races)

# Of PART host or device alone; empty: both.
PART ?=
OF_PART = $(if $(filter host,$(PART)),-LE '^cuda$$',$(if $(filter device,$(PART)),-L '^cuda$$') $(OF_TURN))
asan-ubsan tsan:
	@tools/install-deps.sh ci
	cmake --preset $@
	cmake --build --preset $@ -j $(JOBS) --target fw_$(PART)$(if $(PART),_)tests
	tools/with_fixed_addresses.sh ctest --preset $@ -j $(JOBS) $(OF_PART)

fuzz: ## the readers of files under libFuzzer, FUZZ_SECONDS (60) each
	@tools/install-deps.sh ci
	cmake --preset fuzz
	cmake --build --preset fuzz -j $(JOBS)
	@tools/fuzz.sh $(FUZZ_SECONDS)

clean: ## remove everything that was built
	rm -rf compile_commands.json build build-demo build-debug build-asan-ubsan build-tsan build-fuzz build-tidy build-wheel build-wheel-cpu dist
