"""Prints every link to the web, with the pages that have it, for a look by hand: python docs/list_links.py"""

import collections
import pathlib
import re

ROOT = pathlib.Path(__file__).parents[1]

if __name__ == "__main__":
    found = collections.defaultdict[str, set[str]](set)
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("shardfn/**/*.py")]:
        for link in re.findall(r"https?://[^\s)>\"'`]+", page.read_text()):
            found[link.rstrip(".,;")].add(str(page.relative_to(ROOT)))
    for link in sorted(found):
        print(link, *sorted(found[link]), sep="\n    ")
