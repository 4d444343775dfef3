//! The code in `docs/embedding.md`.

/// The fenced blocks of Rust: their lines without indentation and empty lines.
pub fn rust_blocks(guide: &str) -> Vec<Vec<&str>> {
    let mut blocks = Vec::new();
    let mut lines = guide.lines();
    while let Some(line) = lines.next() {
        if line.starts_with("```rust") {
            blocks.push(trimmed(lines.by_ref().take_while(|line| *line != "```")));
        }
    }
    blocks
}

/// Whether the block's lines follow each other in one of the files.
pub fn stands_in(block: &[&str], files: &[(String, String)]) -> bool {
    assert!(!block.is_empty());
    files.iter().any(|(_, text)| trimmed(text.lines()).windows(block.len()).any(|lines| lines == block))
}

fn trimmed<'a>(lines: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    lines.map(str::trim).filter(|line| !line.is_empty()).collect()
}

#[test]
fn block_that_differs_in_a_word_stands_in_no_file() {
    let files = [("a.rs".to_owned(), "fn a() {\n\n    b(1);\n}\n".to_owned())];

    assert!(stands_in(&["b(1);", "}"], &files));
    assert!(!stands_in(&["b(2);", "}"], &files));
    assert!(!stands_in(&["fn a() {", "}"], &files));
    assert_eq!(rust_blocks("x\n```rust\na\n\n  b\n```\n```text\nc\n```\n"), [["a", "b"]]);
}
