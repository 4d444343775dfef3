//! Waits for connections over sockets.

use sterna_transport::Listener;

use super::interface::{Beginning, Waiting};
use crate::incoming::accept;
use crate::start_error::StartError;

pub(super) fn wait(beginning: Beginning<'_>) -> Result<Waiting, StartError> {
    let custody = beginning.claim()?;
    let listener = Listener::bind(beginning.at).map_err(StartError::system)?;
    let address = listener.local_address();
    let mut shared = beginning.shared(custody, address)?;
    shared.can_be_dialled_again = !listener.is_one_channel();
    Ok(Waiting { shared, listen: Box::new(|shared| accept::spawn(shared, listener).map(Some)) })
}
