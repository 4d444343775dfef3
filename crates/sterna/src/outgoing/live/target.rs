//! Where the stream of a live save goes: a connection, or a file that is complete or absent.

use std::sync::Arc;

use parking_lot::Mutex;
use sterna_transport::{Address, CancelFlag, Channel, CreateOptions, IoPart, PageFile};

use crate::error::{Ending, MigrationError};
use crate::outgoing::file::stream::FileStream;
use crate::outgoing::main_stream::Sink;
use crate::params::Parameters;

/// The open target. Without [`complete`](Self::complete) a file is removed again.
pub(super) enum Target {
    Channel(Arc<Channel>),
    File(Arc<PageFile>, Arc<FileStream>),
}

impl Target {
    /// Connects, or creates the staging file. `adopt` gets the channel before the connection is complete.
    pub(super) fn open(
        to: &Address,
        params: &Parameters,
        cancel: &CancelFlag,
        adopt: impl FnOnce(&Arc<Channel>),
    ) -> Result<Self, MigrationError> {
        let Address::File { path, offset } = to else {
            let adopted = |channel: Channel| {
                channel.set_stall_limit(Some(params.limits.stall));
                let channel = Arc::new(channel);
                adopt(&channel);
                channel
            };
            let channel =
                Channel::connect_with(to, params.tls.as_ref(), params.limits.setup, cancel, adopted)?;
            return Ok(Self::Channel(channel));
        };
        let options = CreateOptions {
            direct: params.direct_io,
            replace: params.replace_file || *offset > 0,
            keep_bytes: *offset,
        };
        let file = Arc::new(PageFile::create(path, options).map_err(MigrationError::storage)?);
        let stream = Arc::new(FileStream::new(&file, *offset));
        Ok(Self::File(file, stream))
    }

    /// Whether bytes can still be written, before the first one.
    pub(super) fn check(&self) -> Result<(), MigrationError> {
        match self {
            Self::Channel(channel) if channel.peer_has_closed() => Err(Ending::Lost.into()),
            _ => Ok(()),
        }
    }

    pub(super) fn sink(&self) -> Arc<dyn Sink> {
        match self {
            Self::Channel(channel) => Arc::clone(channel) as _,
            Self::File(_, stream) => Arc::clone(stream) as _,
        }
    }

    /// Ends the stream: the peer finds its end, or the file gets its name.
    pub(super) fn complete(&self) -> Result<(), MigrationError> {
        match self {
            Self::Channel(channel) => Ok(channel.finish_writing()?),
            Self::File(file, stream) => {
                stream.drain()?;
                file.sync().map_err(MigrationError::storage)?;
                file.publish().map_err(MigrationError::storage)
            }
        }
    }
}

/// Passes the stream on, or keeps the sections that belong after pages which are not sent yet.
pub(super) struct Later {
    to: Arc<dyn Sink>,
    kept: Mutex<Option<Vec<u8>>>,
}

impl Later {
    pub(super) fn new(to: Arc<dyn Sink>) -> Arc<Self> {
        Arc::new(Self { to, kept: Mutex::new(None) })
    }

    /// Keeps all bytes from now on.
    pub(super) fn keep(&self) {
        *self.kept.lock() = Some(Vec::new());
    }

    /// Passes bytes on again, and returns the kept ones.
    pub(super) fn take(&self) -> Vec<u8> {
        self.kept.lock().take().unwrap_or_default()
    }
}

impl Sink for Later {
    fn write_parts(&self, parts: &[IoPart<'_>]) -> Result<(), MigrationError> {
        {
            let mut kept = self.kept.lock();
            if let Some(kept) = &mut *kept {
                for part in parts {
                    let IoPart::Bytes(bytes) = part else {
                        return Err(MigrationError::Internal("a device's section with pages".to_owned()));
                    };
                    kept.extend_from_slice(bytes);
                }
                return Ok(());
            }
        }
        self.to.write_parts(parts)
    }
}
