//! A proxy for plain HTTP on loopback, which takes every host for one and the same.

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

/// A proxy that lives as long as the test process.
pub(crate) struct Proxy {
    port: u16,
    hosts: Arc<Mutex<Vec<String>>>,
}

impl Proxy {
    /// Whatever is asked for is asked of `upstream`.
    pub(crate) fn start(upstream: &str) -> Proxy {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let hosts = Arc::new(Mutex::new(Vec::new()));
        let (seen, upstream) = (Arc::clone(&hosts), upstream.to_owned());
        std::thread::spawn(move || {
            for connection in listener.incoming().flatten() {
                let (seen, upstream) = (Arc::clone(&seen), upstream.clone());
                std::thread::spawn(move || pass_on(connection, &upstream, &seen));
            }
        });
        Proxy { port, hosts }
    }

    pub(crate) fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// The hosts that were asked for.
    pub(crate) fn hosts(&self) -> Vec<String> {
        self.hosts.lock().unwrap().clone()
    }
}

/// Passes one request on; the index ends each connection after its answer.
fn pass_on(mut connection: TcpStream, upstream: &str, seen: &Mutex<Vec<String>>) -> Option<()> {
    let mut lines = BufReader::new(connection.try_clone().ok()?)
        .lines()
        .map_while(Result::ok);
    let request = lines.next()?;
    let address = request
        .split(' ')
        .nth(1)?
        .strip_prefix("http://")?
        .to_owned();
    let (host, path) = address.split_once('/')?;
    seen.lock().unwrap().push(host.to_owned());
    let head: Vec<String> = lines.take_while(|line| !line.is_empty()).collect();
    let mut server = TcpStream::connect(upstream).ok()?;
    write!(
        server,
        "GET /{path} HTTP/1.1\r\n{}\r\n\r\n",
        head.join("\r\n")
    )
    .ok()?;
    std::io::copy(&mut server, &mut connection).ok()?;
    Some(())
}
