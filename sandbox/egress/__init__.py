"""The way out of a sandbox: a proxy that is trusted with nothing, and the connector that hands it sockets."""
