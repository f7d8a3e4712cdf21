"""Engines' adapters, one package an engine: its names and life cycle in, pdstage's out.

Layer 6. Each imports its engine at its top, for the engine is what loads it; nothing else of pdstage imports any of
them.
"""
