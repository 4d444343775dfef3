//! Decides whether this process may send requests to the back end. If another process of this host has the
//! same connection, only one of the two may (`specs/vhost-user.md §7`).

use super::super::error::VhostUserError;
use super::super::turn::Turn;
use super::{ActiveRing, Session};

impl Session {
    /// Ends the requests of this process after the rings have stopped. Another process continues with the
    /// back end.
    pub(in crate::vhost_user) fn fall_silent(&mut self) -> Result<(), VhostUserError> {
        self.check_stopped("passing its back end on")?;
        self.turn = Turn::Theirs;
        Ok(())
    }

    /// Permits requests of this process again, because no other process uses the back end.
    pub(in crate::vhost_user) fn speak(&mut self) {
        if self.turn == Turn::Theirs {
            self.turn = Turn::Regained;
        }
    }

    /// Forgets the rings without a request. They are stopped, or belong to another process.
    pub(in crate::vhost_user) fn forget(&mut self) {
        self.rings.clear();
        self.features = 0;
    }

    /// Sends the first requests of this process to the back end.
    pub(in crate::vhost_user) fn introduce(&mut self) -> Result<(), VhostUserError> {
        self.check_turn("GET_FEATURES")
    }

    /// Checks whether this process may send requests. Must be called before every request, here `call`.
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
                    // The configuration may have changed unnoticed. The write fails only after 2^64 changes
                    // that were not read.
                    let _ = self.changed.write(1);
                }
                agreed
            }
        }
    }

    /// Advances the rings' positions to the used entries. If a destination could not start its guest and
    /// returned it, its back end may have served entries until then. A returned entry was taken.
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
