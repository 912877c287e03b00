"""Forms of files: encodings, JSON arrays, chats, tables of text, and columns of Arrow."""
