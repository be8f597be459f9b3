"""The words of prompts: topics, openings that the target continues, and requests with gaps for code and texts."""

from __future__ import annotations

TOPICS = (
    "reading and writing files", "parsing CSV files", "JSON", "regular expressions", "dates and time zones",
    "HTTP requests", "REST servers", "routing and middleware", "WebSockets", "command-line arguments", "logging",
    "unit tests", "mocking in tests", "error handling", "null and optional values", "string formatting",
    "Unicode text", "sorting and searching", "binary trees", "linked lists", "hash maps",
    "graphs and shortest paths", "recursion", "dynamic programming", "matrices", "bit manipulation",
    "random numbers", "prime numbers", "caching", "concurrency and threads", "asynchronous code",
    "queues and workers", "locks and deadlocks", "generics and type parameters", "interfaces and abstract classes",
    "inheritance and composition", "closures and callbacks", "iterators and generators", "immutable data",
    "pattern matching", "enums", "memory and performance", "profiling slow code", "databases and SQL",
    "transactions", "database migrations", "authentication and sessions", "password hashing", "input validation",
    "configuration files", "environment variables", "dependency injection", "packages and modules", "build tools",
    "linters and formatters", "git", "Docker", "continuous integration", "a text game", "a to-do list",
    "a bank account", "a shopping cart", "a parser for arithmetic", "a rate limiter", "an LRU cache",
    "a state machine", "an event system", "a plug-in system", "a URL shortener", "image files",
    "PDF and HTML output", "web scraping", "DOM and browser events", "forms in a user interface", "serialization",
    "date arithmetic", "money and rounding", "geometry", "statistics", "text statistics and word counts",
    "string reversal and palindromes", "encryption and hashes", "compression", "streams and pipes",
    "signals and shutdown", "sockets", "retries and timeouts", "pagination", "code reviews",
    "refactoring long functions", "naming", "comments and documentation", "debugging a crash", "compiler errors",
)  # fmt: skip

CHAT_TOPICS = (
    "cooking", "travel", "health and sleep", "sport", "history", "geography", "biology", "physics", "chemistry",
    "astronomy", "economics", "personal money", "law in everyday life", "letters and e-mails", "job applications",
    "school essays", "languages and translation", "grammar", "stories for children", "poems", "films and books",
    "music", "gardening", "pets", "household repairs", "presents and parties", "small businesses",
    "marketing texts", "meetings and notes", "learning plans", "philosophy", "riddles and logic",
    "everyday mathematics", "statistics", "computers for beginners", "phones", "photography", "climate",
    "news and politics", "friendship",
)  # fmt: skip

# Openings of a user's message, and what ends it; None is the first empty line.
QUESTION_OPENINGS = {
    "How do I": None, "How can I": None, "What is the best way to": None, "What is the difference between": None,
    "Why does": None, "Why is": None, "Explain": None, "When should I use": None, "Is it possible to": None,
    "In {language}, how": None, "In {language}, what": None, "I get the error": None,
    "I have a {language} class that": None, "What does this {language} code do?\n```{fence}\n": "\n```",
    "Why does this not work?\n```{fence}\n": "\n```", "How can I make this faster?\n```{fence}\n": "\n```",
    "Is this {language} code safe?\n```{fence}\n": "\n```", "Compare": None, "Can you show me an example of": None,
    "Which": None,
}  # fmt: skip

PROGRAM_OPENINGS = {
    "Write a {language} function that": None, "Write a {language} program that": None, "Implement a": None,
    "Write a small {language} command-line tool that": None, "Create a {language} class": None,
    "Using {language}, write": None, "Please write {language} code to": None,
    "I need a function in {language} which": None, "Implement in {language}": None, "Write a script that": None,
    "Give me a minimal {language} example of": None, "Write a {language} method that takes": None,
    "Complete this {language} function:\n```{fence}\n": "\n```", "Write a {language} test for": None,
}  # fmt: skip

CHAT_OPENINGS = (
    "How", "What", "Why", "Can you", "Write", "Give me", "Tell me", "Explain", "I want to", "My", "Suggest",
    "Is it", "Summarize", "List", "Help me", "Which", "Should I", "Describe", "Compare", "Translate",
)  # fmt: skip

CHAT_FOLLOW_UPS = ("Can you", "What if", "What about", "Why", "How", "Now", "Is there", "Give me", "And", "But")

TOOL_OPENINGS = ("Please", "Can you", "I need", "What", "Find", "Could you", "Show me", "How", "Set", "I want", "Get")

SYSTEMS = (
    "You are a helpful coding assistant.",
    "You are an expert software engineer. Keep answers short.",
    "You are a coding assistant inside an editor. Reply with code and only the explanation that is needed.",
    "You are a careful programmer who explains every step.",
    "Reply with code only.",
    "You are a helpful assistant.",
)

FOLLOW_UPS = (
    "Can you explain how that works?",
    "Can you add error handling?",
    "Write unit tests for it.",
    "Add comments to the code.",
    "Can you make it shorter?",
    "Is there a more efficient way?",
    "What is its time complexity?",
    "Show me an example of how to use it.",
    "Now do it without external libraries.",
    "How would I do the same in another language?",
    "What are the edge cases?",
    "Rename the variables so that they are clearer.",
    "Can you turn it into a class?",
    "Give me the whole code again with that change.",
    "Thanks. What should I do next?",
    "Summarize your answer in two sentences.",
)

EDITS = (
    "Add a short comment above every function.",
    "Add documentation comments to all public functions and types.",
    "Remove all comments.",
    "Add logging at the beginning of each function.",
    "Handle errors and invalid arguments.",
    "Add type annotations where they are missing.",
    "Extract repeated code into a helper function.",
    "Replace magic numbers and strings with named constants.",
    "Use early returns instead of nested conditions.",
    "Make the names of local variables more descriptive.",
    "Sort the imports and remove those that are not used.",
    "Add one more function that fits in with the others.",
    "Add a parameter `verbose` that prints what is done.",
    "Add a parameter `timeout` with a default of 30 seconds.",
    "Make the code thread-safe.",
    "Fix typing mistakes in comments and strings.",
    "Convert string concatenation into formatted strings.",
    "Shorten the code without changing what it does.",
    "Add a check for null or missing values.",
    "Change the error messages so that they say what to do.",
    "Add a method or function that returns the number of items.",
    "Turn the first function into an asynchronous one.",
    "Make the fields private and add accessors.",
    "Add a license header of three lines at the top.",
)

EDIT_FORMATS = (
    "{change} Return the whole file.\n\n`{path}`:\n{code}",
    "Here is `{path}`:\n{code}\n\n{change} Reply with the complete file and nothing else.",
    "{code}\n\n{change} Output the full updated code.",
    "Edit this file. {change}\n\n{code}",
    "File: {path}\n{code}\nInstruction: {change}\nReturn the complete new version of the file.",
)

COMMIT = (
    "Write a commit message for this change:\n{diff}",
    "Write a one-line commit message in the imperative.\n\n{diff}",
    "{diff}\n\nSummarize this diff as a commit message with a short body.",
    "What does this change do, and is it safe?\n{diff}",
)

REQUESTS = (
    "Write documentation comments for this {language} code:\n{code}",
    "Write a docstring for the first function.\n{code}",
    "Write unit tests for this code.\n{code}",
    "Write three test cases for `{path}`:\n{code}",
    "Explain what this code does.\n{code}",
    "Explain this {language} code step by step to a beginner.\n{code}",
    "Summarize `{path}` in three sentences.\n{code}",
    "Review this code and suggest improvements.\n{code}",
    "Are there bugs in this code?\n{code}",
    "Translate this code from {language} to {other}.\n{code}",
    "Rewrite this in {other}:\n{code}",
    "What is the purpose of each function in this file?\n{code}",
    "{code}\n\nHow could this be made more readable?",
    "{code}\n\nWrite an example that uses this code.",
    "{code}\n\nWhich edge cases does this not handle?",
    "Write a section of a README about this code:\n{code}",
)

REPAIRS = (
    "There is a bug in this code. Find it and fix it.\n{code}",
    "The tests of `{path}` fail since yesterday. What is wrong?\n{code}",
    "This does not do what it should. Return the corrected code.\n{code}",
    "{code}\n\nFind the mistake and return the whole file with the fix.",
)

EXERCISE = (
    "Write a solution in {language}.\n\n{text}",
    "{text}\n\nSolve this in {language}.",
    "Solve the following exercise in {language}. Reply with the code only.\n\n{text}",
)

JSON_REQUESTS = (
    "Describe this code as JSON with the keys `language`, `functions` (a list of names) and `summary`.\n{code}",
    "List every function of this code as JSON: a list of objects with `name`, `parameters` and `returns`.\n{code}",
    "Return a JSON list of the identifiers that this code imports. No explanation.\n{code}",
    "Extract all quantities from this text as a JSON list of objects with `name`, `value` and `unit`.\n\n{story}",
    "Extract the persons and what they do as JSON with the keys `persons` and `actions`.\n\n{story}",
    'Answer as JSON of the form {{"steps": [...], "answer": number}}.\n\n{story}',
    "Write five records of made-up test data about {topic} as a JSON list. No explanation.",
    "Write a JSON schema for settings of a program about {topic}.",
    "Write a JSON configuration file for a program about {topic}, with sensible defaults.",
    "Review this code. Reply as a JSON list of objects with `line`, `severity` and `message`.\n{code}",
)
