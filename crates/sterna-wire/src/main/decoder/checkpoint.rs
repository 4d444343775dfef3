//! RAM of the checkpoints that a COLO primary sends after a migration (`specs/colo.md §4`).
//!
//! Section ids, blocks and CONTINUE keep their meaning from the migration. Each checkpoint has another END
//! section of RAM, and `00`.

use super::{DecoderState, MainDecoder, Taken, taken};
use crate::error::WireError;
use crate::main::SectionKind;
use crate::main::element::{END, EOF};
use crate::main::expect::BodyKind;
use crate::main::item::MainItem;
use crate::reader::{Reader, Stop};

const MESSAGE: &str = "RAM of a checkpoint";
const SPEC: &str = "specs/colo.md §4";

impl MainDecoder {
    /// Starts to read the RAM of a checkpoint. The next byte is at `position` of the channel.
    ///
    /// The decoder delivers records as in the migration, then [`RamEnd`](MainItem::RamEnd) and
    /// [`CheckpointRam`](MainItem::CheckpointRam).
    ///
    /// # Errors
    /// [`Fault::Local`](crate::Fault::Local) before the end of the migration, or in another checkpoint.
    pub fn begin_checkpoint(&mut self, position: u64) -> Result<(), WireError> {
        if !matches!(self.state, DecoderState::Done | DecoderState::Tail) || !self.sections.is_ram_over() {
            let rule = "a checkpoint begins before the end of RAM, or inside another one";
            return Err(WireError::local(MESSAGE, position, SPEC, rule));
        }
        self.position = position;
        self.in_checkpoint = true;
        self.state = DecoderState::CheckpointRam;
        Ok(())
    }

    pub(super) fn checkpoint_ram(&mut self, r: &mut Reader<'_>) -> Result<Taken, Stop> {
        let kind = r.u8()?;
        if kind != END {
            let rule = format!(
                "{kind:02x} instead of the END section (03) of RAM, the only section of a checkpoint"
            );
            return Err(r.bad(SPEC, rule));
        }
        let id = r.u32()?;
        if self.sections.ram_id() != Some(id) {
            return Err(r.bad(SPEC, format!("END of section {id}, which is not the section of RAM")));
        }
        self.enter(r, id, SectionKind::End, BodyKind::Ram)
    }

    pub(super) fn checkpoint_end(&mut self, r: &mut Reader<'_>) -> Result<Taken, Stop> {
        let kind = r.u8()?;
        if kind != EOF {
            let rule = format!("{kind:02x} after RAM's END instead of 00: a checkpoint has no other section");
            return Err(r.bad(SPEC, rule));
        }
        self.in_checkpoint = false;
        self.state = DecoderState::Tail;
        taken(r, MainItem::CheckpointRam)
    }

    /// The error for a connection that ended inside the RAM of a checkpoint.
    pub(super) fn torn_checkpoint(&self, left: usize) -> WireError {
        let rule = "the connection ended inside a checkpoint, which is discarded";
        WireError::misbehaved(MESSAGE, self.position.saturating_add(left as u64), SPEC, rule)
    }
}
