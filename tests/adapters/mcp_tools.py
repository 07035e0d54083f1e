"""A server of MCP with one tool, which `mcp_agent.py` starts."""

from mcp.server.mcpserver import MCPServer

server = MCPServer("doubling")


@server.tool()
def double(number: int) -> str:
    """Double a number."""
    return str(2 * number)


server.run()
