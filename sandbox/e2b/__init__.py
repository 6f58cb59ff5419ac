"""An HTTP front for clients of the E2B SDK: the same fleet under another interface."""
