"""The image's worker with jobs to do, in a container on this machine's network."""

import signal

from local_endpoint import LocalEndpoint
from worker_process import WorkerProcess

from container.engine import Engine


class WorkerContainer(WorkerProcess):
    """Use it in a `with`, like a WorkerProcess. The process that it looks at is the engine's command, which prints
    what the worker prints and ends with its code."""

    def __init__(self, engine: Engine, endpoint: LocalEndpoint, **env: str) -> None:
        super().__init__(endpoint)
        self._engine = engine
        self._name = engine.new_name()
        self._command = engine.run_command(self._name, network="host", **endpoint.worker_env(), **env)
        self._env = dict(engine.env)

    def send(self, signal_number: int) -> None:
        """To the container's first process."""
        self._engine.call("kill", "--signal", signal.Signals(signal_number).name, self._name)
