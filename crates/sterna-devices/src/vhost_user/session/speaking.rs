//! Who speaks with the back end, where another process of this host has the same connection: one of them at a time
//! (`specs/vhost-user.md §7`).

use super::super::error::VhostUserError;
use super::super::turn::Turn;
use super::{ActiveRing, Session};

impl Session {
    /// The rings have stopped, and another process goes on with the back end: nothing is said from now on.
    pub(in crate::vhost_user) fn fall_silent(&mut self) -> Result<(), VhostUserError> {
        self.check_stopped("handing its back end over")?;
        self.turn = Turn::Theirs;
        Ok(())
    }

    /// No other process goes on with the back end, or none any more.
    pub(in crate::vhost_user) fn speak(&mut self) {
        if self.turn == Turn::Theirs {
            self.turn = Turn::Regained;
        }
    }

    /// Forgets the rings, which run nowhere or are another process's, without a word.
    pub(in crate::vhost_user) fn forget(&mut self) {
        self.rings.clear();
        self.features = 0;
    }

    /// What has to be said first.
    pub(in crate::vhost_user) fn introduce(&mut self) -> Result<(), VhostUserError> {
        self.check_turn("GET_FEATURES")
    }

    /// Whether anything may be said. To be asked before every request, which is `call`.
    pub(super) fn check_turn(&mut self, call: &'static str) -> Result<(), VhostUserError> {
        match self.turn {
            Turn::Ours => Ok(()),
            Turn::Theirs => Err(self.out_of_order(call, "another process has the back end")),
            Turn::Regained => {
                self.turn = Turn::Ours;
                self.catch_up();
                let agreed = self.agree().and_then(|()| self.check_offered(self.features));
                if agreed.is_err() {
                    self.turn = Turn::Regained;
                } else {
                    // It may have changed while nobody heard of it. Refused only if nobody has taken 2^64 of them.
                    let _ = self.changed.write(1);
                }
                agreed
            }
        }
    }

    /// A destination that could not start its guest has given it back, and its back end may have served what it found until then: what was
    /// returned was taken.
    fn catch_up(&mut self) {
        for ActiveRing { ring, .. } in &mut self.rings {
            if let Some(used) = self.memory.read_u16(ring.used + 2)
                && used.wrapping_sub(ring.base).cast_signed() > 0
            {
                ring.base = used;
            }
        }
    }
}
