"""Tools that an assistant may call, as function definitions of OpenAI's API."""

from __future__ import annotations

from typing import Any


def _tool(name: str, description: str, /, **parameters: str) -> dict[str, Any]:
    """Return a definition. A parameter is "type: description"; a name that ends in an underscore is optional."""
    properties = {}
    for key, text in parameters.items():
        kind, _, about = text.partition(": ")
        properties[key.rstrip("_")] = {"type": kind, "description": about}
    required = [key for key in parameters if not key.endswith("_")]
    schema = {"type": "object", "properties": properties, "required": required}
    return {"name": name, "description": description, "parameters": schema}


TOOLS = (
    _tool(
        "get_weather",
        "Get the weather of a city.",
        city="string: name of the city",
        unit_="string: celsius or fahrenheit",
    ),
    _tool("search_web", "Search the web.", query="string: what to look for", count_="integer: number of results"),
    _tool("read_file", "Read a file of the project.", path="string: path from the root of the project"),
    _tool(
        "write_file", "Write a file of the project.", path="string: path of the file", content="string: its new content"
    ),
    _tool(
        "edit_file",
        "Replace text in a file.",
        path="string: path of the file",
        old="string: text to replace",
        new="string: new text",
    ),
    _tool(
        "list_directory",
        "List the files of a folder.",
        path="string: path of the folder",
        recursive_="boolean: whether to list subfolders",
    ),
    _tool(
        "grep",
        "Search all files for a regular expression.",
        pattern="string: the expression",
        glob_="string: which files",
    ),
    _tool("run_command", "Run a shell command.", command="string: the command line", timeout_="integer: seconds"),
    _tool(
        "run_tests",
        "Run the tests of the project.",
        path_="string: file or folder of tests",
        name_="string: name of one test",
    ),
    _tool("git_commit", "Commit the staged changes.", message="string: the commit message"),
    _tool(
        "git_log", "Show the latest commits.", count="integer: number of commits", author_="string: only this author"
    ),
    _tool(
        "create_issue",
        "Create an issue in the tracker.",
        title="string: one line",
        body="string: what happens",
        labels_="array: labels",
    ),
    _tool("query_database", "Run an SQL query.", sql="string: the query", database_="string: name of the database"),
    _tool("send_email", "Send an e-mail.", to="string: address", subject="string: one line", body="string: the text"),
    _tool(
        "create_event",
        "Create an event in the calendar.",
        title="string: what it is",
        start="string: ISO 8601",
        minutes_="integer: how long",
    ),
    _tool("set_reminder", "Set a reminder.", text="string: what of", time="string: ISO 8601"),
    _tool(
        "convert_currency",
        "Convert an amount of money.",
        amount="number: the amount",
        source="string: ISO 4217",
        target="string: ISO 4217",
    ),
    _tool("translate", "Translate a text.", text="string: the text", language="string: into which language"),
    _tool("get_stock_price", "Get the price of a share.", symbol="string: ticker symbol"),
    _tool(
        "book_table",
        "Book a table in a restaurant.",
        restaurant="string: its name",
        time="string: ISO 8601",
        people="integer: how many",
    ),
    _tool("calculate", "Evaluate an arithmetic expression.", expression="string: such as 2 * (3 + 4)"),
    _tool("play_music", "Play a song or an album.", title="string: of the song or album", artist_="string: by whom"),
    _tool("set_temperature", "Set the temperature of a room.", room="string: which room", degrees="number: in celsius"),
    _tool(
        "find_flights",
        "Find flights.",
        origin="string: airport code",
        destination="string: airport code",
        date="string: ISO 8601",
    ),
)
