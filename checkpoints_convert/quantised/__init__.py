"""Checkpoints that come quantised: what their files hold, in one neutral form.

`stored_weights.py` has the neutral forms with the formula of each. `quantization_config.py` reads what config.json
says. `layouts.py` reads the tensors of each layout into a neutral form. `view.py` lets quantised
files look like plain ones to the tables of rules.
"""
