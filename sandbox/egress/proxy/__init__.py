"""What runs as the proxy of a sandbox: pure standard library, in its confinement, trusted by nobody."""
