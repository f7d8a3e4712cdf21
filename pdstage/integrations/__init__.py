"""Adapters that plug pdstage into serving engines, one package per engine.

An engine loads its adapter, which imports that engine's package at the top; nothing else of pdstage imports an adapter.
Adapters contain only names and life cycles: they use the library's public API.
"""
