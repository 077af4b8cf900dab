# SPDX-License-Identifier: Apache-2.0
"""Registration, each case in a process of its own: it changes vLLM's factory."""

import io
import logging
import os
import subprocess
import sys
import textwrap
import traceback
from contextlib import redirect_stdout

import pytest
import vllm.distributed.kv_transfer.kv_connector.factory  # noqa: F401

_PRELUDE = """
import importlib, logging, sys
import vllm.version
# Another test of this process may have registered already.
import vllm.distributed.kv_transfer.kv_connector.factory as factory_module
importlib.reload(factory_module)
sys.modules.pop("vllm.junctions.overlay.plugin", None)
from vllm.config.kv_transfer import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

def select(name="MooncakeStoreConnector", **extra):
    return KVConnectorFactory.get_connector_class(
        KVTransferConfig(
            kv_connector=name, kv_role="kv_both", kv_connector_extra_config=extra
        )
    )

def hooked():
    hooks = sys.modules.get("vllm.junctions.core")
    return hooks.CORE_HOOKS.installed if hooks else ()
"""


def run(code: str) -> str:
    """Run code in a forked child; return what it printed and logged."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read_end)
        status = _run_in_child(_PRELUDE + textwrap.dedent(code), write_end)
        os._exit(status)
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        printed = pipe.read()
    assert os.waitpid(child, 0)[1] == 0, printed
    return printed


def _run_in_child(code: str, write_end: int) -> int:
    out, status = io.StringIO(), 0
    handler = logging.StreamHandler(out)
    vllm_logger = logging.getLogger("vllm")
    vllm_logger.addHandler(handler)
    vllm_logger.setLevel(logging.INFO)
    with redirect_stdout(out):
        try:
            exec(compile(code, "<test>", "exec"), {"__name__": "test"})
        except BaseException:
            traceback.print_exc(file=out)
            status = 1
    with os.fdopen(write_end, "w") as pipe:
        pipe.write(out.getvalue())
    return status


def run_fresh(code: str) -> str:
    """Run code in a new interpreter; return what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", _PRELUDE + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_registering_imports_nothing_of_the_store_and_installs_no_hook():
    out = run_fresh("""
        from vllm.junctions.overlay.plugin import register
        register()
        print([m for m in sys.modules if "mooncake" in m], hooked())
    """)
    assert out.splitlines()[-1] == "[] ()"


def test_the_connector_entry_loads_ours_and_no_other_entry_changes():
    out = run("""
        before = dict(KVConnectorFactory._registry)
        from vllm.junctions.overlay.plugin import register
        register(); register()
        after = KVConnectorFactory._registry
        print([n for n in after if after[n] is not before.get(n)])
        print(select().__module__, hooked())
        print(select("ExampleConnector").__module__)
    """)
    changed, ours, other = out.splitlines()[-3:]
    assert changed == "['MooncakeStoreConnector']"
    assert ours == "vllm.junctions.overlay.drop_in ()"
    assert other.startswith("vllm.distributed.")


def test_junctions_false_selects_the_stock_class():
    out = run("""
        from vllm.junctions.overlay.plugin import register
        register()
        print(select(junctions=False).__module__, hooked())
    """)
    assert "junctions off by configuration" in out
    assert out.splitlines()[-1].startswith("vllm.distributed.")
    assert out.splitlines()[-1].endswith(" ()")


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ('junctions="yes"', "Invalid value 'yes' for 'junctions'"),
        ("junctions_mode=1", "Unknown key 'junctions_mode' (value 1)"),
    ],
)
def test_bad_settings_are_refused_when_the_connector_is_selected(extra, message):
    out = run(f"""
        from vllm.junctions import ConfigurationError
        from vllm.junctions.overlay.plugin import register
        register()
        try:
            select({extra})
        except ConfigurationError as error:
            print(error)
    """)
    assert message in out
    assert 'Accepted: "junctions": true or false' in out


def test_an_unsupported_vllm_warns_once_and_fails_when_selected():
    out = run("""
        vllm.version.__version__ = "0.31.2"
        stock = KVConnectorFactory._registry["ExampleConnector"]
        from vllm.junctions import UnsupportedRuntimeError
        from vllm.junctions.overlay.plugin import register
        register(); register()
        try:
            select()
        except UnsupportedRuntimeError as error:
            print("raised:", error)
        print(select("ExampleConnector").__module__, hooked())
    """)
    warning = "vllm-junctions does not support vLLM 0.31.2 (supported: 0.32.x and"
    assert out.count(warning) == 1
    assert "raised: vllm-junctions does not support vLLM 0.31.2; supported are" in out
    assert "0.32.x and 0.33.x" in out.split("raised:")[1]
    assert out.splitlines()[-1].endswith(" ()")


def test_it_stands_by_with_the_store_half_where_core_has_several_boundaries():
    out = run("""
        from vllm.v1.request import Request
        Request.shared_prefix_boundaries = ()
        from vllm.junctions.overlay.plugin import register
        register()
        print(select().__module__, hooked())
    """)
    assert "stands down" not in out
    assert out.splitlines()[-1].startswith("vllm.junctions.overlay.drop_in")


def test_it_stands_down_where_vllm_has_both_halves_itself():
    out = run("""
        import dataclasses
        from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store import (
            coordinator, data,
        )
        from vllm.v1.request import Request
        Request.shared_prefix_boundaries = property(lambda self: ())
        data.MooncakeLookupResult = dataclasses.make_dataclass(
            "Result", [("junctions", tuple, ())], bases=(data.MooncakeLookupResult,)
        )
        coordinator.MooncakeStoreCoordinator.store_mask = (
            lambda self, length, start=0, prompt=None, boundaries=(): None
        )
        from vllm.junctions.overlay.plugin import register
        register()
        print(select().__module__, hooked())
    """)
    assert "vllm-junctions stands down" in out
    assert out.splitlines()[-1].startswith("vllm.distributed.")


_CONFIGURE = """
from vllm.config import VllmConfig
from vllm.junctions.overlay.plugin import register
register(); register()
import os
os.environ["VLLM_LOGGING_LEVEL"] = "INFO"

def configure(name, **extra):
    transfer = name and KVTransferConfig(
        kv_connector=name, kv_role="kv_both", kv_connector_extra_config=extra
    )
    VllmConfig(kv_transfer_config=transfer or None)
    modules = map(sys.modules.get, (
        "vllm.junctions.declared.hooks", "vllm.junctions.declared.anthropic",
    ))
    print("hooks:", [len(m.HOOKS.installed) for m in modules if m])
"""


def test_a_configuration_with_our_connector_has_marks_read():
    out = run_fresh(f"""{_CONFIGURE}
configure(None)
configure("ExampleConnector")
configure("MooncakeStoreConnector", junctions=False)
configure("MooncakeStoreConnector")
configure("MooncakeStoreConnector")
""")
    hooks = [line for line in out.splitlines() if line.startswith("hooks:")]
    assert hooks == ["hooks: []"] * 3 + ["hooks: [3, 2]"] * 2


def test_marks_are_ignored_where_vllm_does_not_fit_and_the_log_says_so():
    out = run_fresh(f"""{_CONFIGURE}
logging.getLogger("vllm").addHandler(logging.StreamHandler(sys.stdout))
logging.getLogger("vllm").setLevel(logging.INFO)
from vllm.renderers.base import BaseRenderer
BaseRenderer.render_chat = lambda self, something_else: None
configure("MooncakeStoreConnector")
""")
    assert "marks on chat messages are ignored: vllm.renderers.base:" in out
    assert "marks are read on Anthropic messages." in out
    assert "hooks: [0, 2]" in out


def test_a_factory_that_changed_stops_no_engine():
    out = run("""
        del KVConnectorFactory._registry["MooncakeStoreConnector"]
        from vllm.junctions.overlay.plugin import register
        register()
        print(select("ExampleConnector").__module__)
    """)
    assert "could not register with vLLM; nothing was applied" in out


def test_enable_applies_everything():
    out = run("""
        from tools.everywhere import enable
        from vllm.junctions.seams.switches import is_on
        enable(); enable()
        from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.worker import (
            MooncakeStoreWorker,
        )
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        print(len(hooked()), MooncakeStoreWorker.__name__,
              is_on(KVCacheManager, "junctions"), select().__module__)
    """)
    assert (
        out.splitlines()[-1]
        == "5 JunctionStoreWorker True vllm.junctions.overlay.drop_in"
    )
