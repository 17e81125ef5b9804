"""One module for each page, or each group of pages."""
