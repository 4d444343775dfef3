//! What must be true of a guest whose primary was killed or frozen.

use sterna_guests::ProcessGuest;

use super::account::Account;
use crate::colo::judge::whole;
use crate::colo::play::{Again, until};
use crate::colo::voice::{Voice, numbers};

/// The most that a process may have been about to write when it was frozen: a piece of the gate's.
const LEAVING: usize = 4096;

/// What the observer and the judge saw of a primary.
pub(super) struct Seen {
    /// The standby says that the guest goes on from this one.
    pub(super) checkpoint: u64,
    /// What the primary told of each that it took: number, steps, sum of its memory.
    pub(super) accounts: Vec<String>,
    /// All that came out of its process.
    pub(super) heard: Vec<u8>,
    /// How much of it before it woke, and how the protection ended there.
    pub(super) woken: Option<(usize, String)>,
}

impl Seen {
    /// From which checkpoint the guest went on, and how much a primary that woke still said.
    pub(super) fn judge(
        &self,
        (guest, says): (&ProcessGuest, Voice),
        account: &Account,
        again: &[(Again, String)],
    ) -> Result<(u64, Option<usize>), String> {
        let [(again, found)] = again else { return Err(format!("said again {} times", again.len())) };
        self.is_a_checkpoint(account, found)?;
        let late = self.woken.as_ref().map(|(before, how)| self.woke(*before, how)).transpose()?;
        self.observer(again, says)?;
        whole(guest)?;
        Ok((self.checkpoint, late))
    }

    /// The survivor is what the primary was in the pause of that checkpoint.
    fn is_a_checkpoint(&self, account: &Account, found: &str) -> Result<(), String> {
        let loaded = account.loaded().ok_or("no account came with the guest")?;
        if loaded.split_once(' ').is_none_or(|(_, of)| of != found) {
            return Err(format!("the survivor is {found:?}, and its checkpoint was {loaded:?}"));
        }
        // What the seeding saved is number 0.
        if !loaded.starts_with(&format!("{} ", self.checkpoint)) {
            return Err(format!(
                "the guest goes on from {loaded:?} and not from checkpoint {}",
                self.checkpoint
            ));
        }
        if !self.accounts.contains(&loaded) {
            return Err(format!("the primary has taken no checkpoint {loaded:?}"));
        }
        Ok(())
    }

    /// What was heard is never ahead of the survivor and lacks nothing.
    fn observer(&self, again: &Again, mut says: Voice) -> Result<(), String> {
        let Again { position, bytes, steps } = again;
        let at = *position as usize;
        let Some(tail) = self.heard.get(at..) else {
            let heard = self.heard.len();
            return Err(format!(
                "the survivor goes on from byte {at}, and the primary was heard up to {heard}"
            ));
        };
        if !bytes.starts_with(tail) {
            return Err(format!(
                "the primary was heard ahead of its survivor: {} bytes after byte {at}, of which it knows {}",
                tail.len(),
                bytes.len()
            ));
        }
        let known = [&self.heard[..at], bytes].concat();
        if let Some(ahead) = numbers(&known)?.into_iter().find(|said| said > steps) {
            return Err(format!("step {ahead} was heard of, and the survivor was at {steps}"));
        }
        until(|| says.heard().len() > bytes.len())?;
        says.end();
        let whole = [&self.heard[..at], &says.heard()].concat();
        if !whole.starts_with(&known) {
            return Err("the survivor was heard out of order".into());
        }
        numbers(&whole).map(drop)
    }

    /// It lets nothing out and stops its guest.
    fn woke(&self, before: usize, how: &str) -> Result<usize, String> {
        if !matches!(how, "Lost false false" | "HandedOver false false") {
            return Err(format!(
                "the primary woke, and its guest runs at the standby: {how} (outcome, runs, may run)"
            ));
        }
        let late = self.heard.len() - before;
        if late > LEAVING {
            return Err(format!("the primary woke and said {late} bytes"));
        }
        Ok(late)
    }
}
