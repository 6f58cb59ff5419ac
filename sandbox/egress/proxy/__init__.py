"""What runs as the proxy of a sandbox: pure standard library, mounted into its confinement, trusted by nobody."""
