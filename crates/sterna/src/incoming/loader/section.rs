//! Sections of devices: the handover, chunks of device streams, and the state of other devices.

use sterna_proto::MigrationId;
use sterna_proto::destination::Event as Fed;
use sterna_wire::WireError;
use sterna_wire::extension::Handover;
use sterna_wire::main::SectionKind;

use super::{CHANNEL, Loader};
use crate::error::MigrationError;
use crate::events::Event;
use crate::incoming::streams::inbox::Inbox;
use crate::incoming::target::Section;
use crate::streams;

impl Loader<'_> {
    pub(super) fn section(
        &mut self,
        name: &str,
        instance: u32,
        version: u32,
        kind: SectionKind,
        body: &[u8],
    ) -> Result<(), MigrationError> {
        if name == Handover::SECTION_NAME {
            let handover = Handover::decode(version, body).map_err(MigrationError::wire(CHANNEL))?;
            let id = MigrationId(handover.migration_id);
            self.check_session(id)?;
            self.is_sterna = true;
            self.shared.tell(&Event::Peer { sterna: true, features: self.shared.features().0 });
            match handover.secret {
                Some(secret) => *self.shared.secret.lock() = Some((id, secret)),
                None => self.shared.tell(&Event::Warning(
                    "the source is an older Sterna, which sends no secret: if the acknowledgement is lost, the source gets no \
                     answer, and an operator has to decide there"
                        .to_owned(),
                )),
            }
            self.shared.report(Fed::HandoverIdRead(id));
            return Ok(());
        }
        if let Some(device) = streams::device_of_section(name)
            && let Ok(inbox) = self.shared.streams.find(device, instance)
        {
            return chunk_of_section(inbox, body);
        }
        self.shared.target.section(&Section {
            id: self.decoder.section_id(),
            name,
            instance,
            version,
            kind,
            body,
        })
    }

    /// Refuses a migration other than the one that the source named when it connected.
    fn check_session(&self, id: MigrationId) -> Result<(), MigrationError> {
        match self.shared.carrier.session() {
            Some(session) if session != id => {
                let rule = "another migration's id than the session of the RDMA connection";
                let error =
                    WireError::misbehaved("handover", self.decoder.position(), "specs/rdma.md §2.3", rule);
                Err(MigrationError::wire(CHANNEL)(error))
            }
            _ => Ok(()),
        }
    }
}

/// Stores a chunk from a stream's section. START and END sections are empty.
fn chunk_of_section(inbox: &Inbox, body: &[u8]) -> Result<(), MigrationError> {
    if body.is_empty() {
        return Ok(());
    }
    // The decoder has already checked the length against the limit of a chunk.
    let mut payload = inbox.buffer(body.len() as u32)?;
    payload.copy_from_slice(body);
    inbox.put(payload)
}
