"""Adapters that plug pdstage into serving engines, one package an engine.

An adapter is loaded by its engine and imports that engine's package at its top; nothing else of pdstage imports an
adapter. Adapters hold names and life cycles only: what they need of the library is the library's own API.
"""
