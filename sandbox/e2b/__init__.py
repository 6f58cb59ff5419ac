"""An HTTP front for clients of the E2B SDK: the same sandboxes, projects and quotas under another interface."""
