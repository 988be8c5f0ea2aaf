import pytest
from served import Served


@pytest.fixture
def serve():
    servers = []

    def start(role="null", **more):
        servers.append(Served(role=role, **more))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture(scope="session")
def shared():
    """One server for each role, for tests whose requests are refused before the engine hears of them."""
    servers = {}

    def get(role="null"):
        if role not in servers:
            servers[role] = Served(role=role)
        return servers[role]

    yield get
    for server in servers.values():
        server.close()
