//! Compares the code in `docs/embedding.md` with the example's sources.

/// The fenced code blocks that are marked as Rust.
pub fn rust_blocks(guide: &str) -> Vec<String> {
    let mut blocks = Vec::new();
    let mut lines = guide.lines();
    while let Some(line) = lines.next() {
        if line.starts_with("```rust") {
            blocks.push(lines.by_ref().take_while(|line| *line != "```").collect::<Vec<_>>().join("\n"));
        }
    }
    blocks
}

/// Whether one of the files contains the block; line breaks and indentation are ignored.
pub fn stands_in(block: &str, files: &[(String, String)]) -> bool {
    let block = without_space(block);
    assert!(!block.is_empty());
    files.iter().any(|(_, text)| without_space(text).contains(&block))
}

fn without_space(text: &str) -> String {
    text.split_whitespace().collect()
}

#[test]
fn block_that_differs_in_a_word_stands_in_no_file() {
    let files = [("a.rs".to_owned(), "fn a() {\n\n    b(1);\n}\n".to_owned())];

    assert!(stands_in("b(1);\n}", &files));
    assert!(!stands_in("b(2);\n}", &files));
    assert!(!stands_in("fn a() {\n}", &files));
    assert_eq!(rust_blocks("x\n```rust\na\n  b\n```\n```text\nc\n```\n"), ["a\n  b"]);
}
