PYTHON ?= .venv/bin/python

test:
	$(PYTHON) -m pytest -m "not slow"
