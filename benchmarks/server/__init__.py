"""`blockdraft serve` under load: its speed beside its own engine's and llama-server's, and faults."""
