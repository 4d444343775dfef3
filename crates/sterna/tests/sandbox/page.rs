//! docs/sandboxes.md shows the table of the code.

use sterna::sandbox::{Argument, Feature, Syscall, TABLE, Thread};

/// The table as Markdown, one part for each feature.
fn rows() -> String {
    let mut text = String::new();
    for feature in Feature::ALL {
        text += &format!(
            "\n### {feature:?}\n\n| system call | argument | threads | when |\n| --- | --- | --- | --- |\n"
        );
        for call in TABLE.iter().filter(|call| call.feature == *feature) {
            text +=
                &format!("| `{}` | {} | {} | {} |\n", call.name, argument(call), threads(call), when(call));
        }
    }
    text + "\n"
}

fn argument(call: &Syscall) -> String {
    match call.argument {
        Argument::Is { index, value, name } => {
            format!("{index}: `{}` ({value:#x})", name.replace('|', "\\|"))
        }
        Argument::Lacks { index, name, .. } => format!("{index}: without `{}`", name.replace('|', "\\|")),
        _ => String::new(),
    }
}

fn threads(call: &Syscall) -> String {
    let name = |thread: &Thread| match thread {
        Thread::SourceCaller => "caller (source)".to_owned(),
        Thread::DestinationCaller => "caller (destination)".to_owned(),
        Thread::Engine(role) => format!("`{role}`"),
    };
    if call.threads.is_empty() {
        return "every thread".to_owned();
    }
    call.threads.iter().map(name).collect::<Vec<_>>().join(", ")
}

fn when(call: &Syscall) -> String {
    format!("{:?}", call.when).to_lowercase()
}

/// `STERNA_BLESS=1` writes the table instead.
#[test]
fn document_has_the_table() {
    const BEGIN: &str =
        "<!-- table: written by `STERNA_BLESS=1 cargo test -p sterna --test sandbox page::` -->\n";
    const END: &str = "<!-- end of table -->";
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/sandboxes.md");
    // A published crate does not contain the document.
    let Ok(document) = std::fs::read_to_string(path) else { return };
    let (before, rest) = document.split_once(BEGIN).expect("the mark before the table");
    let (listed, after) = rest.split_once(END).expect("the mark after the table");
    let rows = rows();
    if std::env::var_os("STERNA_BLESS").is_some() {
        std::fs::write(path, format!("{before}{BEGIN}{rows}{END}{after}")).unwrap();
        return;
    }
    assert_eq!(listed, rows, "run this test with STERNA_BLESS=1");
}
