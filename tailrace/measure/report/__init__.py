"""Results for people: `words` for any place, `html` as one page that needs nothing else.

The plots are SVG that is written here (`svg`): a page is some tens of kilobytes, is read without scripts, and prints.
"""
