# make setup | demo | slides | site | workshop | badges | setup-cells
# make test | lint | fuse | fuzz | test-browser | test-overlay | test-colab | test-today | test-lowest
# make test-formats | test-engines | stress
# make peers | benchmark | gpu | colab
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
LOWEST := runs/lowest/bin/python
OVERLAY = runs/overlay/env/$(patsubst %.txt,%,$(notdir $(or $(RUNTIME),now)))
LISTS := https://raw.githubusercontent.com/googlecolab/backend-info/main
TODAY := runs/today/today.txt

.PHONY: setup demo slides site workshop badges setup-cells test fuse fuzz lint test-browser test-colab
.PHONY: test-overlay test-today test-lowest test-formats test-engines stress peers benchmark gpu colab

# A .venv with everything; it is made again from scratch when you delete it.
setup: $(INSTALLED)

# Debian ships Python without ensurepip, so the system's pip puts pip into the new environment.
$(INSTALLED): requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("error: expected Python 3.11 or newer, found " + sys.version.split()[0] + ": run make setup PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	test -x $(RUN) || $(PYTHON) -m venv --without-pip $(VENV)
	$(RUN) -m pip --version || $(PYTHON) -m pip --python $(RUN) install pip || $(RUN) -m ensurepip
	$(RUN) -m pip install -r requirements.txt -e '.[dev]'
	touch $@

# The five notebooks on the built-in dataset, or on yours: make demo IMAGES=photos
# ANNOTATIONS=photos.json. LABS=0 leaves out the labs behind each notebook. Where the run contradicts
# a sentence, its page says so. With STRICT=1 such a notebook runs again, and the demo fails where
# both runs contradict the sentence
demo: setup
	$(RUN) -m tools.run_notebooks --output runs/demo $(if $(IMAGES),--images "$(IMAGES)") $(if $(ANNOTATIONS),--annotations "$(ANNOTATIONS)") $(if $(filter 0,$(LABS)),--no-labs) $(if $(filter-out 0,$(STRICT)),--strict)

# The figures of the demo as PNG files and one PDF: runs/slides
slides: setup
	$(RUN) -m tools.slides

# The site, from the notebooks of the demo, which runs first where it has not: runs/site/index.html.
# A warning of Sphinx is an error, and so is a link within the site that leads nowhere
site: setup
	@$(RUN) -c 'import furo, myst_nb, sphinx' 2>/dev/null || $(RUN) -m pip install -e '.[site]'
	$(RUN) -m tools.build_site

# Five notebooks with the package inside, to hand out: runs/workshop
workshop: setup
	$(RUN) -m tools.cells workshop

# Three processes, since many tests wait, for all that does not look at clocks; the rest alone. A
# failure of the first run does not keep the second one from running. The slowest tests are named.
# Hundreds of processes need not compile the package anew.
test: export PYTHONDONTWRITEBYTECODE :=
# Tests fork after they trained, which CUDA forbids: make gpu has the tests of a GPU.
test: export CUDA_VISIBLE_DEVICES :=
test: lint fuse
	status=0; \
	$(RUN) -m pytest -n 3 --dist loadfile --no-loadscope-reorder --durations=30 -m "not clock and not browser" || status=1; \
	$(RUN) -m pytest --durations=30 -m "clock and not browser" $$(grep -rlF mark.clock tests --include='test_*.py') || status=1; \
	exit $$status

# The notebooks in JupyterLab and the first page of the site, in a browser: needs Chromium or Chrome;
# screenshots are left in runs/browser. axe-core, which judges the page's accessibility, comes by npm
test-browser: setup
	@$(RUN) -c 'import playwright' 2>/dev/null || $(RUN) -m pip install playwright
	@command -v npm >/dev/null && npm install --silent --prefix runs/npm axe-core || \
		echo "note: no npm: the site's accessibility is not judged"
	$(RUN) -m pytest -m browser tests/site tests/notebooks/test_browser.py

# What sees versions, numpy, Pillow and pycocotools above all, and one small notebook, with the small
# packages of one of Colab's runtimes, such as RUNTIME=2026.04; downloads them once, about 50 MB, to
# runs/overlay. What takes long sees processes rather than versions
test-overlay: setup
	status=0; \
	$(RUN) -m tests.colab.run_scenarios --overlay --runtime "$(or $(RUNTIME),now)" || status=1; \
	PYTHONPATH=. CUDA_VISIBLE_DEVICES= $(OVERLAY)/bin/python -m pytest -p no:cacheprovider -W default -n 2 \
		-k "not (other_processes or memory_does_not_grow or killed)" -m "not clock" \
		tests/data $(addprefix tests/shards/test_,arrays.py index.py records.py write.py) \
		$(addprefix tests/loading/test_,batch.py dataset.py masks.py targets.py) || status=1; \
	exit $$status

# The notebooks with all versions of one of Colab's runtimes, Python's and torch's, too; downloads them
# once, about 3 GB, to runs/colab
test-colab: setup
	$(RUN) -m tests.colab.run_scenarios --runtime "$(or $(RUNTIME),now)"

# Both with the packages that Colab has today, by the lists that it publishes
test-today: setup
	mkdir -p runs/today
	rm -f $(TODAY)
	curl --fail --silent --show-error $(addprefix $(LISTS)/,pip-freeze.txt os-info.txt) > runs/today/lists
	mv runs/today/lists $(TODAY)
	status=0; \
	$(MAKE) test-overlay RUNTIME=$(TODAY) || status=1; \
	$(MAKE) test-colab RUNTIME=$(TODAY) || status=1; \
	exit $$status

# The tests with the lowest versions that requirements.txt allows; downloads 3 GB to runs/lowest.
# The newest ones, which make test has, would hide what these do not know yet
test-lowest: setup
	mkdir -p runs/lowest
	sed 's/>=/==/' requirements.txt > runs/lowest/constraints.txt
	test -x $(LOWEST) || $(RUN) -m venv --without-pip runs/lowest
	$(RUN) -m pip --python $(LOWEST) install -q -c runs/lowest/constraints.txt -e '.[dev]' pip 'setuptools>=77'
	PYTHONPATH=. $(LOWEST) -m pytest -W default -n 3 --dist loadfile -m "not clock and not browser"

# The recipes of docs/FORMATS.md with the converters and trainers that they name, shards at a stand-in
# for the Hugging Face Hub, and unchanged scripts of frameworks under watch, in environments of their
# own; downloads 500 MB
test-formats: setup
	$(RUN) -m benchmarks.environments --work runs/benchmarks --only formats --only frameworks
	PYTHONPATH=. runs/benchmarks/envs/formats/bin/python -m pytest -W ignore tests/data/test_formats.py tests/shards/test_hub.py
	PYTHONPATH=. EVERY_STALL=1 runs/benchmarks/envs/frameworks/bin/python -m pytest -W ignore tests/diagnosis/test_script.py tests/diagnosis/test_frameworks.py

# Shards by Dask and by Ray, in processes that are killed, and at S3, in an environment of
# their own; downloads 210 MB
test-engines: setup
	$(RUN) -m benchmarks.environments --work runs/benchmarks --only engines
	PYTHONPATH=. runs/benchmarks/envs/engines/bin/python -m pytest -W ignore tests/shards/test_engines.py tests/shards/test_stores.py

# For a mounted Drive to test on; without it those tests are skipped, and say so
fuse:
	@command -v fusermount3 >/dev/null || { test "$$(id -u)" = 0 && \
		{ timeout 120 apt-get install -y -qq fuse3 || timeout 120 sh -c "apt-get update -qq && apt-get install -y -qq fuse3"; } >/dev/null 2>&1; } || \
		echo "note: no fuse3 (apt-get install fuse3): the tests on a mounted Drive are skipped"

lint: setup
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

# Mutated JSON, images, shards and zips: each is read right, refused in one line, or a bug. CI runs
# CASES=1500 of them; another SEED gives others
fuzz: setup
	$(RUN) -m tests.fuzz --cases $(or $(CASES),100000) --seed $(or $(SEED),0)

# Slow: a COCO JSON of train2017's size, ten epochs over an index of that size, a check of 5,000
# images, with limits on time and memory, 200 kills of preprocess, 40 of a training that writes its
# shards, the notebooks in the scene of a real GPU
stress: setup
	$(RUN) tests/stress/read_large_coco.py
	$(RUN) -m tests.stress.load_large_index
	$(RUN) tests/stress/check_large_dataset.py
	$(RUN) -m tests.stress.kill_preprocess
	$(RUN) -m tests.stress.kill_copy_images
	$(RUN) -m tests.stress.kill_open_dataset
	$(RUN) -m tests.stress.run_gpu_scene

# An environment for each loader that `make benchmark` compares with; what cannot be installed is
# named
peers: setup
	$(RUN) -m benchmarks.environments

# Every loader on the same work: make benchmark IMAGES=photos ANNOTATIONS=photos.json
benchmark: setup
	$(RUN) -m benchmarks.loaders --images $(IMAGES) --annotations $(ANNOTATIONS) --json runs/benchmarks/results.json

# On a machine with a GPU, torch and the packages of requirements.txt: what only a GPU can tell, in
# at most 25 minutes; needs no .venv. First come the tests that are skipped without a GPU, where
# pytest and its plugins are there. A row that fails is named, and the others go on
gpu:
	-PYTHONPATH=. timeout 375 $(PYTHON) -m pytest -p no:cacheprovider -W ignore::pytest.PytestConfigWarning --continue-on-collection-errors tests/training/test_on_gpu.py tests/training/test_losses.py tests/loading
	PYTHONPATH=. $(PYTHON) -m benchmarks.gpu --json runs/benchmarks/gpu.json --minutes 18

# On a T4 of Google Colab, by Google's command `colab` (pip install google-colab-cli) and your account:
# the figures of make gpu, notebooks 01 and 05 with the real step, with DRIVE=1 on your Google Drive.
# One JSON file comes to receipts/. It takes some 40 minutes of a T4
colab: setup
	$(RUN) -m tools.colab_t4 --colab "$(or $(COLAB),colab)" $(if $(DRIVE),--drive)

# Badges and install lines name a repository: make badges REPO=owner/name. On GitHub, the workflow
# Notebooks does this at each push
badges:
	@$(PYTHON) -m tools.cells badges "$(REPO)"

# After a change of tools/setup_cell.txt: writes it into the notebooks
setup-cells:
	@$(PYTHON) -m tools.cells setup
