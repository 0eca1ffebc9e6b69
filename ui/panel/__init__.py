"""The page for people: server-rendered, works without JavaScript, keeps itself up to date where there is some.

routes.py the doors · guard.py what stands before them · live.py the stream · pages.py what a page shows · words.py how it
says it · templates/ and static/
"""
