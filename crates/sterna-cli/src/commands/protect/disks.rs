//! `--disk NODE[=NAME]`: parsing, and the progress of the initial copy.

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::json;
use sterna_drive::protect::{DiskCopy, ProtectedDisk};

use crate::interrupts::Interrupts;
use crate::{terminal, units};

/// Interval between two lines of output.
const LINE: Duration = Duration::from_secs(1);

/// Parses `NODE` or `NODE=NAME`. Without a name, the export has the node's name.
pub fn parse(text: &str) -> Result<ProtectedDisk, String> {
    let (node, export) = text.split_once('=').unwrap_or((text, text));
    if node.is_empty() || export.is_empty() {
        return Err("write NODE or NODE=NAME".to_owned());
    }
    Ok(ProtectedDisk { node: node.to_owned(), export: export.to_owned() })
}

/// A callback that prints a line per second, and that returns whether to continue. Ctrl-C cancels the copy.
pub fn progress(interrupts: &Interrupts, is_json: bool) -> Arc<dyn Fn(DiskCopy) -> bool + Send + Sync> {
    let interrupts = interrupts.clone();
    let due = parking_lot::Mutex::new(Instant::now());
    Arc::new(move |copy| {
        let mut due = due.lock();
        if Instant::now() >= *due {
            *due = Instant::now() + LINE;
            terminal::print(&line(is_json, copy));
        }
        interrupts.count() == 0
    })
}

fn line(is_json: bool, copy: DiskCopy) -> String {
    let DiskCopy { copied_bytes, total_bytes } = copy;
    if is_json {
        let value = json!({
            "schema": "sterna-protect", "version": 1, "state": "copying disks",
            "disk_copied_bytes": copied_bytes, "disk_total_bytes": total_bytes,
        });
        return format!("{value}\n");
    }
    format!("copying     disks, {} of {}\n", units::bytes(copied_bytes), units::bytes(total_bytes))
}
