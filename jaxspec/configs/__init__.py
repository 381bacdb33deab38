"""Configs, which describe models: one module for each family. Nothing here uses arrays."""
