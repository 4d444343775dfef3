//! Sends checkpoints to the standby while QEMU's guest already runs again.
//!
//! A checkpoint is kept in memory as it arrives from QEMU. When all of it has arrived, this side answers QEMU, so the
//! guest's pause does not depend on the network. The guest's output stays at the gates until the standby itself has
//! answered. If the contact is lost before that, the standby takes over from the previous checkpoint. So far only output
//! that the previous checkpoint contains has been released.
//!
//! The standby sees the usual order: the next REQUEST is sent to it after its LOADED, and its REPLY is sent to QEMU.
//! So one checkpoint is on its way, and the next one is taken when the standby holds it. The guest runs meanwhile.
//!
//! In two cases only the standby answers. With disks, the standby assigns QEMU's writes to the checkpoint that it is
//! receiving, so the guest must not write before that ends. After the last checkpoint of a planned takeover the guest
//! does not run here.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, poll};
use sterna_transport::Channel;

use super::super::answers::Answer;
use super::packets::Packets;
use super::words::{Word, Words};
use super::{Ended, PIECE_BYTES, Shared, spawn};

/// How long the standby may take to load the last answered checkpoint after QEMU has ended.
const LAST_LIMIT: Duration = Duration::from_secs(1);

/// The decoder of a channel.
enum Follows {
    Main(Words),
    /// A multifd channel with its index.
    Pages(usize, Packets),
}

impl Shared {
    /// Whether checkpoints may be kept in memory.
    pub(super) fn may_keep(&self) -> bool {
        self.kept.most_bytes() > 0 && self.state.lock().disks.is_empty()
    }

    /// Waits until QEMU has sent something. True if the seeding is over, so that checkpoints are kept.
    pub(super) fn is_kept_next(&self, qemu: &Channel) -> bool {
        if let Some(socket) = qemu.socket() {
            // A failed poll is harmless: the error appears again when the socket is read.
            let _ = poll(&mut [PollFd::from_borrowed_fd(socket.as_fd(), PollFlags::IN)], None);
        }
        self.progress.is_followed()
    }

    /// Copies from QEMU to the standby after the end of the seeding. `index`: of a multifd channel; none for the main
    /// one.
    pub(super) fn keep_on(
        self: &Arc<Self>,
        qemu: &Channel,
        standby: Arc<Channel>,
        index: Option<usize>,
        waits: Arc<Mutex<Option<Instant>>>,
    ) -> Ended {
        let channel = self.kept.add_channel();
        let shared = Arc::clone(self);
        let write = move || {
            let ended = shared.kept.drain(channel, |piece| {
                *waits.lock() = Some(Instant::now());
                let written = standby.write_all(piece);
                *waits.lock() = None;
                written
            });
            if let Some(error) = ended {
                shared.over(Ended::of_standby(error));
            }
        };
        if let Err(error) = spawn("relay keeps", write) {
            return Ended::new(format!("cannot start a thread: {error}"));
        }
        let mut follows = match index {
            Some(index) => Follows::Pages(index, Packets::default()),
            None => Follows::Main(Words::new()),
        };
        let mut piece = vec![0; PIECE_BYTES];
        loop {
            let length = match qemu.read_some(&mut piece) {
                Ok(length) if length > 0 => length,
                end => {
                    self.progress.wait_for_answered(Some(LAST_LIMIT));
                    return end.map_or_else(Ended::of_qemu, |_| Ended::closed_by_qemu());
                }
            };
            let come = &piece[..length];
            if let Err(ended) = self.take_note(&mut follows, come) {
                return ended;
            }
            if !self.kept.put(channel, come.to_vec()) {
                return Ended::new("the stream was closed");
            }
            self.bytes.fetch_add(length as u64, Ordering::Relaxed);
        }
    }

    /// Decodes the arrived bytes, before the standby can have received them.
    fn take_note(&self, follows: &mut Follows, come: &[u8]) -> Result<(), Ended> {
        if self.progress.lost_because().is_some() {
            return Ok(());
        }
        let answer = match follows {
            Follows::Pages(index, packets) => packets.push(come).map(|syncs| {
                (syncs > 0).then(|| self.progress.synced(*index, syncs, |number| self.may_answer(number)))?
            }),
            Follows::Main(words) => match words.push(come) {
                Ok(words) => {
                    words.into_iter().try_fold(None, |answer, word| self.hear(word).map(|of| of.or(answer)))
                }
                Err(why) => Err(why),
            },
        };
        match answer {
            Ok(Some(number)) => self.answer(number),
            Ok(None) => Ok(()),
            Err(why) => {
                self.progress.lose(why);
                // The bytes may contain a REQUEST, which the standby must not receive before its LOADED.
                self.progress.wait_for_answered(None);
                Ok(())
            }
        }
    }

    /// Acts on a decoded word. Returns the number of a checkpoint that must be answered now.
    fn hear(&self, word: Word) -> Result<Option<u64>, String> {
        match word {
            Word::Request => match self.progress.wait_until_loaded() {
                true => Ok(None),
                false => Err("the stream was closed".to_owned()),
            },
            Word::Flush => {
                self.progress.flush();
                Ok(None)
            }
            Word::Whole => Ok(self.progress.main_whole(|number| self.may_answer(number))),
        }
    }

    fn may_answer(&self, number: u64) -> bool {
        self.steps.upgrade().is_some_and(|steps| steps.may_answer(number))
    }

    /// Answers checkpoint `number`, which is complete here. QEMU's guest is paused.
    fn answer(&self, number: u64) -> Result<(), Ended> {
        let Some(steps) = self.steps.upgrade() else {
            return Err(Ended::new("the protection was ended"));
        };
        if !steps.received(number) {
            self.is_deaf.store(true, Ordering::Release);
            return Ok(());
        }
        let Some(main) = self.state.lock().main.clone() else { return Ok(()) };
        let bytes = [Answer::Received(number).bytes(), Answer::Loaded(number).bytes()].concat();
        main.write_all(&bytes).map_err(Ended::of_qemu)
    }
}
