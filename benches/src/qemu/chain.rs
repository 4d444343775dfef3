//! A chain of machines: each destination is the next source, so RAM is filled only once.

use std::cell::RefCell;

use sterna_benches::machines::{Lab, Role, Side};
use sterna_benches::peer::Peer;

use crate::Failure;
use crate::content::Content;

/// Machines of one side with one content. The machine that received the guest is the next source.
pub struct Chain<'a> {
    pub lab: &'a Lab,
    pub side: Side,
    pub content: &'a Content,
    /// Whether memory suffices for one more machine of each side. These are in addition to the timed
    /// machines.
    keeps: bool,
    ready: RefCell<Option<Peer>>,
}

impl<'a> Chain<'a> {
    pub fn new(lab: &'a Lab, side: Side, content: &'a Content) -> Self {
        Self { lab, side, content, keeps: may_keep(content.bytes), ready: RefCell::new(None) }
    }

    /// A stopped machine that contains the content.
    pub fn source(&self) -> Result<Peer, Failure> {
        if let Some(peer) = self.ready.borrow_mut().take() {
            return Ok(peer);
        }
        let peer = self.lab.start(self.side, Role::Source, self.content.bytes)?;
        self.content.put(&peer.ram()?)?;
        Ok(peer)
    }

    /// A machine that waits for a migration.
    pub fn destination(&self, role: Role) -> Result<Peer, Failure> {
        self.lab.start(self.side, role, self.content.bytes)
    }

    /// Keeps a machine that has received the content. With `check`, verifies the content first.
    pub fn arrived(&self, peer: Peer, check: bool) -> Result<(), Failure> {
        if check {
            self.content.check(&peer.ram()?)?;
        }
        *self.ready.borrow_mut() = self.keeps.then_some(peer);
        Ok(())
    }
}

/// Whether memory suffices to keep a machine. It must hold two waiting machines, one that starts, an image on
/// a tmpfs, and a reserve.
fn may_keep(bytes: u64) -> bool {
    let about = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = about.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib: Option<u64> = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse().ok());
    kib.is_some_and(|kib| 6 * bytes < kib * 1024)
}
