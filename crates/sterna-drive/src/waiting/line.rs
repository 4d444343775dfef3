//! Reads the memory backends from the command line of a VM that waits.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::DriveError;

/// A memory backend whose file the standby fills.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RamFile {
    /// The backend's id, which is also in the name of the block.
    pub id: String,
    /// Path of the backend's file.
    pub path: PathBuf,
}

impl RamFile {
    /// Whether `block` is the name of this backend's block.
    pub(super) fn is_of(&self, block: &str) -> bool {
        block == self.id || block.strip_prefix("/objects/") == Some(&self.id)
    }
}

/// Removes `-incoming defer` from the command. It is added again when the VM is started.
///
/// # Errors
/// [`DriveError::Request`]: another `-incoming`, or `-S`, with which a guest that is taken over would stay paused.
pub(super) fn without_incoming(command: &[OsString]) -> Result<Vec<OsString>, DriveError> {
    let is_incoming = |argument: &OsStr| argument == "-incoming" || argument == "--incoming";
    let mut left = command.to_vec();
    if command.iter().skip(1).any(|argument| argument == "-S" || argument == "--S") {
        return Err(DriveError::Request(
            "the command has `-S`, with which the guest would stay paused after a takeover: leave it out"
                .to_owned(),
        ));
    }
    while let Some(at) = left.iter().position(|argument| is_incoming(argument)) {
        if left.get(at + 1).is_none_or(|value| value != "defer") {
            return Err(DriveError::Request(
                "the command's `-incoming` must be `defer`, because the guest is loaded only at the takeover"
                    .to_owned(),
            ));
        }
        left.drain(at..at + 2);
    }
    Ok(left)
}

/// The memory backends whose files are in `directory`.
pub(super) fn ram_files(command: &[OsString], directory: &Path) -> Result<Vec<RamFile>, DriveError> {
    let mut found = Vec::new();
    for pair in command.windows(2) {
        if pair[0] != "-object" && pair[0] != "--object" {
            continue;
        }
        let text = pair[1].to_string_lossy();
        let Some(properties) = properties(&text) else { continue };
        let get =
            |name: &str| properties.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str());
        let (Some("memory-backend-file"), Some(id), Some(path)) =
            (get("qom-type"), get("id"), get("mem-path"))
        else {
            continue;
        };
        let path = Path::new(path);
        let parent = path.parent().unwrap_or(Path::new(""));
        if parent != directory && parent.canonicalize().ok().as_deref() != Some(directory) {
            continue;
        }
        if !matches!(get("share"), Some("on" | "true" | "yes" | "y")) {
            return Err(DriveError::Request(format!(
                "the memory backend {id:?} needs share=on: otherwise the VM does not see the standby's writes to {}",
                path.display()
            )));
        }
        if get("offset").is_some_and(|offset| offset != "0") {
            return Err(DriveError::Request(format!(
                "the memory backend {id:?} has an offset: its memory must begin at the start of the file {}",
                path.display()
            )));
        }
        found.push(RamFile { id: id.to_owned(), path: path.to_owned() });
    }
    if found.is_empty() {
        let place = directory.join("ram");
        return Err(DriveError::Request(format!(
            "the command has no memory in {}: give it `-object memory-backend-file,id=ID,size=SIZE,mem-path={},share=on` and \
             `-machine …,memory-backend=ID`, with the ID of the primary's memory backend",
            directory.display(),
            place.display()
        )));
    }
    Ok(found)
}

/// An object's properties, as JSON or as `TYPE,NAME=VALUE,…`, where a comma in a value is doubled.
fn properties(text: &str) -> Option<Vec<(String, String)>> {
    if text.trim_start().starts_with('{') {
        let Value::Object(members) = serde_json::from_str(text).ok()? else { return None };
        let plain = |value: Value| match value {
            Value::String(text) => text,
            other => other.to_string(),
        };
        return Some(members.into_iter().map(|(name, value)| (name, plain(value))).collect());
    }
    // Replace doubled commas first, because a single comma separates properties.
    let hidden = text.replace(",,", "\0");
    let parts = hidden.split(',').enumerate().map(|(index, part)| {
        let part = part.replace('\0', ",");
        match part.split_once('=') {
            Some((name, value)) => (name.to_owned(), value.to_owned()),
            None if index == 0 => ("qom-type".to_owned(), part),
            // A property without a value means `on`, for example `share`.
            None => (part, "on".to_owned()),
        }
    });
    Some(parts.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn command(text: &str) -> Vec<OsString> {
        text.split(' ').map(OsString::from).collect()
    }

    fn files(text: &str) -> Result<Vec<RamFile>, String> {
        ram_files(&command(text), Path::new("/ram,dir")).map_err(|error| error.to_string())
    }

    #[test]
    fn memory_below_the_directory_is_found_in_either_form() {
        let json = r#"{"qom-type":"memory-backend-file","id":"a","mem-path":"/ram,dir/a","share":true}"#;
        let line = format!(
            "qemu -m 1G -object memory-backend-file,id=m0,size=1G,mem-path=/ram,,dir/ram,share=on -object {json} \
             -object memory-backend-file,id=other,mem-path=/elsewhere/x,share=on -object rng-random,id=r"
        );

        let found = files(&line).expect("found");

        let file = |id: &str, path: &str| RamFile { id: id.into(), path: path.into() };
        assert_eq!(found, [file("m0", "/ram,dir/ram"), file("a", "/ram,dir/a")]);
        assert!(found[0].is_of("m0") && found[0].is_of("/objects/m0") && !found[0].is_of("m00"));
    }

    #[test]
    fn memory_that_is_missing_or_private_is_refused_with_what_to_write() {
        let missing = files("qemu -m 1G").expect_err("none");
        assert!(missing.contains("memory-backend-file,id=ID"), "{missing}");
        for private in ["", ",share=off"] {
            let line = format!("qemu -object memory-backend-file,id=m0,mem-path=/ram,,dir/ram{private}");
            assert!(files(&line).expect_err("private").contains("share=on"));
        }
        let offset = "qemu -object memory-backend-file,id=m0,mem-path=/ram,,dir/ram,share=on,offset=4096";
        assert!(files(offset).expect_err("not the whole file").contains("offset"));
    }

    #[test]
    fn incoming_may_be_defer_alone() {
        let left = without_incoming(&command("qemu -incoming defer -m 1G")).expect("defer");
        assert_eq!(left, command("qemu -m 1G"));
        for wrong in ["qemu -incoming tcp:0:1", "qemu -m 1G -incoming"] {
            assert!(without_incoming(&command(wrong)).is_err(), "{wrong}");
        }
    }

    #[test]
    fn command_that_would_leave_the_guest_paused_is_refused() {
        for wrong in ["qemu -m 1G -S", "qemu --S -incoming defer"] {
            let refused = without_incoming(&command(wrong)).expect_err("-S").to_string();
            assert!(refused.contains("`-S`"), "{refused}");
        }
    }
}
