"""vLLM: its KV connector.

Layer 6. Must not know other engines.
"""
