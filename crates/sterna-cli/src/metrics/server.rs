//! The HTTP endpoint: one answer for each connection.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use sterna_transport::{Address, CancelFlag, Channel, Listener, TransportError};

use super::page::CONTENT_TYPE;
use crate::exit::Stop;

/// Connections that are served at the same time; further ones are closed.
const MOST_CLIENTS: usize = 8;
/// Bytes of a request's head.
const MOST_HEAD: usize = 8 << 10;
/// Time for a request to arrive, and for its answer to be taken.
const LIMIT: Duration = Duration::from_secs(5);

type Write = Arc<dyn Fn() -> String + Send + Sync>;

/// A listening endpoint. Dropping it ends it.
pub struct MetricsServer {
    address: Address,
    cancel: CancelFlag,
    thread: Option<JoinHandle<()>>,
}

impl MetricsServer {
    /// Serves the text that `page` writes, at `GET /metrics`. `at`: HOST:PORT, tcp:HOST:PORT or unix:PATH.
    ///
    /// # Errors
    /// The address is not one of these, or cannot be listened at.
    pub fn start(at: &str, page: impl Fn() -> String + Send + Sync + 'static) -> Result<Self, Stop> {
        let address = address(at)?;
        let failed = |error: &dyn std::fmt::Display| Stop::failed(format!("--metrics {at}: {error}"));
        let listener = Listener::bind(&address).map_err(|error| failed(&error))?;
        let address = listener.local_address();
        let cancel = CancelFlag::new();
        let (ends, write): (_, Write) = (cancel.clone(), Arc::new(page));
        let thread = std::thread::Builder::new()
            .name("metrics".to_owned())
            .spawn(move || accept(&listener, &ends, &write))
            .map_err(|error| failed(&error))?;
        Ok(Self { address, cancel, thread: Some(thread) })
    }

    /// As [`start`](Self::start), if an address was given. The address is printed, because the kernel may choose a port.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    pub fn start_if(
        at: Option<&str>,
        page: impl Fn() -> String + Send + Sync + 'static,
    ) -> Result<Option<Self>, Stop> {
        let server = at.map(|at| Self::start(at, page)).transpose()?;
        if let Some(server) = &server {
            crate::terminal::note(&format!("sterna: metrics at {}", server.address));
        }
        Ok(server)
    }

    /// The address, with the port that the kernel chose.
    pub fn address(&self) -> &Address {
        &self.address
    }
}

impl Drop for MetricsServer {
    fn drop(&mut self) {
        self.cancel.cancel();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn address(text: &str) -> Result<Address, Stop> {
    let is_whole = text.starts_with("tcp:") || text.starts_with("unix:");
    let whole = if is_whole { text.to_owned() } else { format!("tcp:{text}") };
    let address: Result<Address, TransportError> = whole.parse();
    address.map_err(|_| {
        Stop::usage(format!("--metrics {text:?}: write HOST:PORT or unix:PATH, for example 127.0.0.1:9187"))
    })
}

fn accept(listener: &Listener, cancel: &CancelFlag, write: &Write) {
    let clients = Arc::new(AtomicUsize::new(0));
    loop {
        let channel = match listener.accept(None, cancel) {
            Ok(channel) => channel,
            Err(TransportError::Cancelled { .. }) => return,
            Err(_) => {
                // No descriptor is free, for example. Without a pause the loop would only repeat the error.
                std::thread::sleep(Duration::from_millis(100));
                continue;
            }
        };
        if clients.load(Ordering::Acquire) >= MOST_CLIENTS {
            channel.shutdown();
            continue;
        }
        clients.fetch_add(1, Ordering::AcqRel);
        let (counted, write) = (Arc::clone(&clients), Arc::clone(write));
        let serve = move || {
            answer(&channel, &write);
            counted.fetch_sub(1, Ordering::AcqRel);
        };
        if std::thread::Builder::new().name("metrics client".to_owned()).spawn(serve).is_err() {
            clients.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

fn answer(channel: &Channel, write: &Write) {
    let text = match head(channel) {
        Some(Ok(head)) => respond(&head, write),
        Some(Err(status)) => plain(status),
        None => return channel.shutdown(),
    };
    channel.set_stall_limit(Some(LIMIT));
    if channel.write_all(text.as_bytes()).and_then(|()| channel.finish_writing()).is_ok() {
        // The client closes. If this side closed first, unread bytes of the client could discard the answer.
        let until = Instant::now() + LIMIT;
        let mut rest = [0; 512];
        while Instant::now() < until && matches!(channel.read_some(&mut rest), Ok(1..)) {}
    }
    channel.shutdown();
}

/// Reads until the empty line after the head. `None`: the client has gone or is too slow. An error is the status.
fn head(channel: &Channel) -> Option<Result<String, &'static str>> {
    let until = Instant::now() + LIMIT;
    let mut head = Vec::new();
    let mut buffer = [0; 1024];
    while !head.windows(4).any(|end| end == b"\r\n\r\n") {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return None;
        }
        channel.set_stall_limit(Some(left));
        match channel.read_some(&mut buffer) {
            Ok(0) | Err(_) => return None,
            Ok(count) => head.extend_from_slice(&buffer[..count]),
        }
        if head.len() > MOST_HEAD {
            return Some(Err("431 Request Header Fields Too Large"));
        }
    }
    Some(String::from_utf8(head).map_err(|_| "400 Bad Request"))
}

fn respond(head: &str, write: &Write) -> String {
    let words: Vec<&str> = head.lines().next().unwrap_or_default().split(' ').collect();
    let [method, target, version] = words[..] else { return plain("400 Bad Request") };
    if !version.starts_with("HTTP/1.") {
        return plain("505 HTTP Version Not Supported");
    }
    let path = target.split('?').next().unwrap_or_default();
    match (method, path) {
        ("GET", "/metrics") => {
            let body = write();
            format!("{}{body}", headers("200 OK", CONTENT_TYPE, body.len()))
        }
        ("HEAD", "/metrics") => headers("200 OK", CONTENT_TYPE, write().len()),
        ("GET" | "HEAD", _) => plain("404 Not Found"),
        _ => plain("405 Method Not Allowed"),
    }
}

fn plain(status: &str) -> String {
    let body = format!("{status}: the metrics are at GET /metrics\n");
    format!("{}{body}", headers(status, "text/plain; charset=utf-8", body.len()))
}

fn headers(status: &str, kind: &str, length: usize) -> String {
    let allow = if status.starts_with("405") { "Allow: GET, HEAD\r\n" } else { "" };
    format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\n{allow}Connection: close\r\n\r\n"
    )
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write as _};
    use std::net::TcpStream;

    use super::*;

    fn server() -> MetricsServer {
        MetricsServer::start("127.0.0.1:0", || "a 1\n".to_owned()).unwrap()
    }

    fn ask(server: &MetricsServer, request: &str) -> String {
        let Address::Tcp { port, .. } = server.address() else { panic!("a port") };
        let mut client = TcpStream::connect(("127.0.0.1", *port)).unwrap();
        client.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        let _ = client.write_all(request.as_bytes());
        let mut answer = String::new();
        let _ = client.read_to_string(&mut answer);
        answer
    }

    #[test]
    fn endpoint_answers_requests_and_refuses_what_is_none() {
        let server = server();
        for (request, status, body) in [
            ("GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n", "200 OK", "a 1\n"),
            ("GET /metrics?x=1 HTTP/1.0\r\n\r\n", "200 OK", "a 1\n"),
            ("HEAD /metrics HTTP/1.1\r\n\r\n", "200 OK", ""),
            ("GET / HTTP/1.1\r\n\r\n", "404 Not Found", "GET /metrics\n"),
            ("POST /metrics HTTP/1.1\r\n\r\n", "405 Method Not Allowed", "GET /metrics\n"),
            ("GET /metrics HTTP/2\r\n\r\n", "505 HTTP Version Not Supported", "GET /metrics\n"),
            ("nonsense\r\n\r\n", "400 Bad Request", "GET /metrics\n"),
        ] {
            let answer = ask(&server, request);
            let (head, rest) = answer.split_once("\r\n\r\n").expect(&answer);
            assert!(head.starts_with(&format!("HTTP/1.1 {status}\r\n")), "{request}: {answer}");
            assert!(rest.ends_with(body) && (body.is_empty() == rest.is_empty()), "{request}: {answer}");
            let length = if request.starts_with("HEAD") { 4 } else { rest.len() };
            assert!(head.contains(&format!("Content-Length: {length}\r\n")), "{answer}");
        }
    }

    #[test]
    fn endpoint_refuses_a_head_without_an_end_and_closes_more_clients_than_it_serves() {
        let server = server();
        let endless = format!("GET /metrics HTTP/1.1\r\n{}", "a: b\r\n".repeat(2000));
        let answer = ask(&server, &endless);
        assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 431"), "{answer}");

        let Address::Tcp { port, .. } = *server.address() else { panic!("a port") };
        let mut silent: Vec<_> =
            (0..MOST_CLIENTS + 4).map(|_| TcpStream::connect(("127.0.0.1", port)).unwrap()).collect();
        let last = silent.last_mut().unwrap();
        last.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        // Those that send nothing keep their places for a limited time; the last one has none.
        assert!(!matches!(last.read(&mut [0; 1]), Ok(1..)));
    }

    #[test]
    fn address_may_lack_its_kind_and_must_name_a_port() {
        assert_eq!(address("127.0.0.1:9187").unwrap(), "tcp:127.0.0.1:9187".parse().unwrap());
        assert_eq!(address("unix:/run/m").unwrap(), "unix:/run/m".parse().unwrap());
        assert!(address("9187").is_err() && address("host").is_err());
    }
}
