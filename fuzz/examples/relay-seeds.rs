//! Writes seeds for the fuzz targets of the relay: frames, greetings, conversations, packed pages, dictionaries.
//!
//! `cargo run -p sterna-fuzz --example relay-seeds -- fuzz/seeds` (the directory is the argument).
#![forbid(unsafe_code)]

use std::path::PathBuf;

use sterna_fuzz::targets::{relay_dictionary, relay_frame, relay_greeting, relay_packed, relay_session};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let all = std::env::args().nth(1).map(PathBuf::from).ok_or("give the directory to write to")?;
    for (target, seeds) in [
        ("relay_dictionary", relay_dictionary::seeds()),
        ("relay_frame", relay_frame::seeds()),
        ("relay_greeting", relay_greeting::seeds()),
        ("relay_packed", relay_packed::seeds()),
        ("relay_session", relay_session::seeds()),
    ] {
        let directory = all.join(target);
        std::fs::create_dir_all(&directory)?;
        for (name, input) in seeds {
            std::fs::write(directory.join(name), input)?;
        }
    }
    Ok(())
}
