// Search of the documentation in files on a disk: browsers refuse workers there, so one is played by a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.appendChild(this.frame);
      const inside = this.frame.contentWindow;
      this.heard = event => {
        if (event.source !== inside) return;
        const copy = new MessageEvent("message", { data: event.data });
        this.dispatchEvent(copy);
        if (this.onmessage) this.onmessage(copy);
      };
      window.addEventListener("message", this.heard);
      const page = inside.document;
      page.open();
      page.write("<!doctype html><html><body></body></html>");
      page.close();
      inside.postMessage = data => window.dispatchEvent(new MessageEvent("message", { data, source: inside }));
      const load = address => new Promise((done, failed) => {
        const script = page.createElement("script");
        script.src = address;
        script.onload = done;
        script.onerror = failed;
        page.body.appendChild(script);
      });
      inside.importScripts = (...addresses) =>
        addresses.reduce((before, address) => before.then(() => load(new URL(address, url))), Promise.resolve());
      this.ready = load(url);
    }

    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() {
      window.removeEventListener("message", this.heard);
      this.frame.remove();
    }
  };
}
