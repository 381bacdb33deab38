"""Settings of JAX with which jaxspec cannot run. Users make them by variables such as JAX_PLATFORMS.

Read `check_jax_settings`. Random draws depend on no setting, see `sampling.make_key`.
"""

from __future__ import annotations

import jax

_REFUSED = {
    "jax_disable_jit": ("True", "jaxspec runs compiled programs only; unset it"),
    "jax_no_tracing": ("True", "jaxspec traces its programs; unset it"),
    "jax_numpy_rank_promotion": (
        "raise",
        'weights with one axis meet activations with three; set it to "allow" or "warn"',
    ),
    "jax_transfer_guard": (
        "disallow",
        'prompts come from the host, and tokens go there; set it to "allow" or "log"',
    ),
}
"""The refused value of each setting, or its beginning; and why, with the way out."""


class JaxSettingsError(ValueError):
    """A setting of JAX with which jaxspec cannot run. The message has the way out."""


def check_jax_settings() -> None:
    """Refuse settings that would end in an error deep inside a program.

    Raises:
      JaxSettingsError: naming the setting.
    """
    for name, (refused, reason) in _REFUSED.items():
        if (value := str(getattr(jax.config, name))).startswith(refused):
            raise JaxSettingsError(f"JAX's setting {name} is {value}: {reason}")


def check_devices() -> None:
    """Start JAX's devices.

    Raises:
      JaxSettingsError: it finds none.
    """
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # jax 0.10 asserts where a plugin is missing
        reason = str(error).partition("(set JAX_PLATFORMS")[0].strip(" .")
        platforms = jax.config.values["jax_platforms"]
        raise JaxSettingsError(
            f"JAX finds no device{f': {reason}' if reason else ''}. JAX_PLATFORMS is "
            f"{platforms!r}: unset it, or set it to cpu, or with a GPU to cuda"
        ) from None
