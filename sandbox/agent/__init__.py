"""The resident agent: the only code of ours that runs inside a sandbox."""
