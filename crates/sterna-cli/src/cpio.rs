//! Writes an initramfs: an uncompressed cpio archive in the kernel's "newc" format.

use std::collections::BTreeSet;
use std::fmt::Write as _;

/// An archive under construction.
#[derive(Debug, Default)]
pub struct Archive {
    bytes: Vec<u8>,
    directories: BTreeSet<String>,
}

impl Archive {
    /// Adds a directory and its parents, unless they exist.
    pub fn directory(&mut self, path: &str) {
        for (end, _) in path.match_indices('/').chain([(path.len(), "")]) {
            if end > 0 && self.directories.insert(path[..end].to_owned()) {
                self.entry(&path[..end], 0o040755, &[]);
            }
        }
    }

    /// Adds an executable file.
    pub fn file(&mut self, path: &str, content: &[u8]) {
        if let Some((directory, _)) = path.rsplit_once('/') {
            self.directory(directory);
        }
        self.entry(path, 0o100755, content);
    }

    /// Ends the archive and returns its bytes.
    pub fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, &[]);
        self.bytes
    }

    fn entry(&mut self, path: &str, mode: u32, content: &[u8]) {
        let inode = self.bytes.len() as u32; // any number that no other entry has
        let mut header = String::from("070701");
        // inode, mode, uid, gid, links, mtime, size, device ×4, length of the name with its NUL, checksum
        for word in [inode, mode, 0, 0, 1, 0, content.len() as u32, 0, 0, 0, 0, path.len() as u32 + 1, 0] {
            let _ = write!(header, "{word:08x}");
        }
        self.bytes.extend(header.bytes().chain(path.bytes()).chain([0]));
        self.pad();
        self.bytes.extend(content);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}
