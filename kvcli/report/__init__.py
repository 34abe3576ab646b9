"""From recorded numbers to what people look at: terminal, pictures, tables, a page. Pure functions; nothing here runs
a model or knows a command."""
