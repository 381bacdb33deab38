"""Configs: what a model is, a module a family. Nothing here touches an array."""
